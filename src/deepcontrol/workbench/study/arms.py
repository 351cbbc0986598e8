"""Arms of a comparison: one network trained in one way, over several seeds."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..models import Norm
from ..optim import learning_rate

Model = Literal["segnet", "classnet"]


@dataclass(frozen=True)
class Arm:
    """The settings that claims vary. Claims that need equal arms share their runs."""

    norm: Norm
    batch: int
    lr: float
    model: Model = "segnet"
    init: Literal["he", "identity", "unit"] = "he"
    fixed_lambda: float | None = None
    fixed_gamma: float | None = None
    class_weight_scale: float = 1.0
    clip_grad_norm: float | None = None

    @property
    def name(self) -> str:
        """Prefix of the run folders' names, unique to the arm.

        >>> agc(4).name, agc(8, 0.64, fixed_lambda=0.0).name
        ('segnet-agc-b4-lr0.08', 'segnet-agc-b8-lr0.64-lambda0')
        """
        parts = [self.model, self.norm, f"b{self.batch}", f"lr{self.lr:g}"]
        if self.init != "he":
            parts.append(self.init)
        for name, value in self._changed().items():
            parts.append(f"{name}{value:g}")
        return "-".join(parts)

    def __str__(self) -> str:
        """Label for tables.

        >>> str(bn(1)), str(agc(4, init="identity"))
        ('BN, batch 1, lr 0.02', 'AGC, batch 4, lr 0.08, identity init')
        """
        words = [self.norm.upper(), f"batch {self.batch}", f"lr {self.lr:g}"]
        if self.model == "classnet":
            words.insert(0, "ClassNet")
        return ", ".join([*words, *self.variants])

    @property
    def variants(self) -> list[str]:
        """Descriptions of the settings that differ from the paper's.

        >>> agc(4, init="identity", fixed_gamma=1.0).variants
        ['identity init', 'gamma = 1']
        """
        words = {"lambda": "lambda = {:g}", "gamma": "gamma = {:g}"}
        words |= {"weights": "class weights x {:g}", "clip": "clip norm {:g}"}
        init = [] if self.init == "he" else [f"{self.init} init"]
        return init + [words[name].format(value) for name, value in self._changed().items()]

    def scale_lr(self, factor: float) -> "Arm":
        """Multiply the learning rate.

        >>> agc(4).scale_lr(4).lr
        0.32
        """
        return replace(self, lr=round(factor * self.lr, 10))

    def _changed(self) -> dict[str, float]:
        values = {
            "lambda": self.fixed_lambda,
            "gamma": self.fixed_gamma,
            "weights": None if self.class_weight_scale == 1 else self.class_weight_scale,
            "clip": self.clip_grad_norm,
        }
        return {name: value for name, value in values.items() if value is not None}


def agc(batch: int, lr: float | None = None, **others: Any) -> Arm:
    """Return an arm with AGC. lr defaults to the paper's for this batch size."""
    return Arm("agc", batch, learning_rate(batch) if lr is None else lr, **others)


def bn(batch: int, lr: float | None = None, **others: Any) -> Arm:
    """Return an arm with BatchNorm.

    >>> bn(4) == bn(4, 0.08)
    True
    """
    return replace(agc(batch, lr, **others), norm="bn")


def gn(batch: int, lr: float | None = None, **others: Any) -> Arm:
    """Return an arm with GroupNorm.

    >>> gn(8).name, str(gn(8))
    ('segnet-gn-b8-lr0.16', 'GN, batch 8, lr 0.16')
    """
    return replace(agc(batch, lr, **others), norm="gn")
