"""An arm of a comparison: a network trained in one way, over several seeds."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from ..models import Norm
from ..optim import learning_rate

Model = Literal["segnet", "classnet"]


@dataclass(frozen=True)
class Arm:
    """What a claim varies. Arms that are equal are trained once, whoever needs them."""

    norm: Norm
    batch: int
    rate: float
    model: Model = "segnet"
    init: Literal["he", "identity", "unit"] = "he"
    fixed_lambda: float | None = None
    fixed_gamma: float | None = None
    class_weight_scale: float = 1.0
    clip_grad_norm: float | None = None

    @property
    def name(self) -> str:
        """Of its folders: all that it is, so that different arms have different names.

        >>> agc(4).name, agc(8, 0.64, fixed_lambda=0.0).name
        ('segnet-agc-b4-lr0.08', 'segnet-agc-b8-lr0.64-lambda0')
        """
        parts = [self.model, self.norm, f"b{self.batch}", f"lr{self.rate:g}"]
        return "-".join([*parts, *(f"{name}{value}" for name, value in self._specials().items())])

    def __str__(self) -> str:
        """As a reader has it.

        >>> str(bn(1)), str(agc(4, init="identity"))
        ('BN batch 1 rate 0.02', 'AGC batch 4 rate 0.08 identity')
        """
        words = [self.norm.upper(), f"batch {self.batch}", f"rate {self.rate:g}"]
        if self.model == "classnet":
            words.insert(0, "ClassNet")
        return " ".join([*words, *self.specials])

    @property
    def specials(self) -> list[str]:
        """What is not as usual, for a reader.

        >>> agc(4, init="identity", fixed_gamma=1.0).specials
        ['identity', 'gamma 1']
        """
        return [f"{name} {value}".strip() for name, value in self._specials().items()]

    def at_rate_times(self, factor: float) -> "Arm":
        """The same at another rate.

        >>> agc(4).at_rate_times(4).rate
        0.32
        """
        return replace(self, rate=round(factor * self.rate, 10))

    def _specials(self) -> dict[str, str]:
        """The same by name, with the value where there is one."""
        found: dict[str, str] = {}
        if self.init != "he":
            found[self.init] = ""
        if self.fixed_lambda is not None:
            found["lambda"] = f"{self.fixed_lambda:g}"
        if self.fixed_gamma is not None:
            found["gamma"] = f"{self.fixed_gamma:g}"
        if self.class_weight_scale != 1:
            found["weights"] = f"{self.class_weight_scale:g}"
        if self.clip_grad_norm is not None:
            found["clip"] = f"{self.clip_grad_norm:g}"
        return found


def agc(batch: int, rate: float | None = None, **others: Any) -> Arm:
    """AGC, at the paper's rate for this batch unless told otherwise."""
    return Arm("agc", batch, learning_rate(batch) if rate is None else rate, **others)


def bn(batch: int, rate: float | None = None, **others: Any) -> Arm:
    """The same with BatchNorm.

    >>> bn(4) == bn(4, 0.08)
    True
    """
    return replace(agc(batch, rate, **others), norm="bn")
