"""Arms of a comparison: one network trained in one way, over several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..models import Norm
from ..optim import learning_rate
from ..train.config import Model

NORM_LABELS = {"evonorm-s0": "EvoNorm-S0", "none": "no norm"}  # others in capitals
OPTION_LABELS = {
    "background": "background {}",
    "class_weights": "class weights {}",
    "dropout": "dropout {}",
    "epochs": "{} epochs",
    "gems": "GEMS {}",
    "lambda_lr": "lambda lr x {}",
    "lambda_start": "lambda from {}",
    "momentum": "momentum {}",
    "noise": "noise {}",
}


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
    options: tuple[tuple[str, float | str], ...] = ()  # further settings of the run; see `varied`

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
        for name, option in self.options:
            parts.append(f"{name}{_option_text(option)}".replace("_", "").replace(":", ""))
        return "-".join(parts)

    def __str__(self) -> str:
        """Label for tables.

        >>> str(bn(1)), str(agc(4, init="identity"))
        ('BN, batch 1, lr 0.02', 'AGC, batch 4, lr 0.08, identity init')
        >>> str(Arm("none", 128, 0.1, "resnet20")), str(Arm("agc", 64, 0.1, "mlp"))
        ('ResNet-20, no norm, batch 128, lr 0.1', 'MLP, AGC, batch 64, lr 0.1')
        """
        return ", ".join(self.settings.values())

    @property
    def settings(self) -> dict[str, str]:
        """The words of the label, by setting.

        >>> agc(4).settings
        {'norm': 'AGC', 'batch': 'batch 4', 'lr': 'lr 0.08'}
        """
        model = {} if self.model == "segnet" else {"model": model_label(self.model)}
        norm = NORM_LABELS.get(self.norm, self.norm.upper())
        common = {"norm": norm, "batch": f"batch {self.batch}", "lr": f"lr {self.lr:g}"}
        return model | common | self.variants

    @property
    def variants(self) -> dict[str, str]:
        """Descriptions of the settings that differ from the paper's.

        >>> agc(4, init="identity", fixed_gamma=1.0).variants
        {'init': 'identity init', 'gamma': 'gamma = 1'}
        """
        words = {"lambda": "lambda = {:g}", "gamma": "gamma = {:g}"}
        words |= {"weights": "class weights x {:g}", "clip": "clip norm {:g}"}
        init = {} if self.init == "he" else {"init": f"{self.init} init"}
        changed = {name: words[name].format(value) for name, value in self._changed().items()}
        options = {
            name: OPTION_LABELS[name].format(_option_text(option)) for name, option in self.options
        }
        return init | changed | options

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


def varied(arm: Arm, **options: float | str) -> Arm:
    """Return an arm with further settings of `deepcontrol train`.

    >>> arm = varied(agc(1), background="window:15", momentum=0.99)
    >>> arm.name, str(arm)  # doctest: +NORMALIZE_WHITESPACE
    ('segnet-agc-b1-lr0.02-backgroundwindow15-momentum0.99',
     'AGC, batch 1, lr 0.02, background window:15, momentum 0.99')
    """
    unknown = sorted(set(options) - set(OPTION_LABELS))
    if unknown:
        raise ValueError(f"no label for {', '.join(unknown)}: choose from {sorted(OPTION_LABELS)}")
    return replace(arm, options=tuple(sorted({**dict(arm.options), **options}.items())))


def _option_text(option: float | str) -> str:
    return option if isinstance(option, str) else f"{option:g}"


def model_label(model: Model) -> str:
    """Return the name of a network for tables.

    >>> [model_label(model) for model in ("classnet", "resnet56", "plain20", "mlp")]
    ['ClassNet', 'ResNet-56', 'plain-20', 'MLP']
    """
    names = {"segnet": "SegNet", "classnet": "ClassNet", "mlp": "MLP"}
    return names.get(model) or model.replace("resnet", "ResNet-").replace("plain", "plain-")


@dataclass(frozen=True)
class Tuned:
    """An arm at the best of several learning rates, the same grid for all contenders.

    The first seed trains every learning rate. The one with the lowest final error is chosen, the
    lower one after a tie, and only that one trains further seeds. A run that diverged is never
    chosen. The rule is `choose` in rules.py.
    """

    arms: tuple[Arm, ...]  # they differ in the learning rate only, which rises

    def __post_init__(self) -> None:
        lrs = [arm.lr for arm in self.arms]
        same = {replace(arm, lr=lrs[0]) for arm in self.arms} if lrs else set()
        if len(same) != 1 or lrs != sorted(set(lrs)):
            raise ValueError(
                "expected arms that differ only in the learning rate, in rising order, got "
                f"{', '.join(map(str, self.arms)) or 'none'}"
            )

    def __str__(self) -> str:
        """Label for tables if no learning rate is chosen.

        >>> str(tuned(Arm("bn", 8, 0.0, "resnet20"), (0.01, 0.03, 0.1)))
        'ResNet-20, BN, batch 8, lr 0.01 to 0.1'
        """
        return ", ".join(self.settings.values())

    @property
    def settings(self) -> dict[str, str]:
        """The words of the label, by setting."""
        first, last = self.arms[0], self.arms[-1]
        return first.settings | {"lr": f"lr {first.lr:g} to {last.lr:g}"}

    @property
    def name(self) -> str:
        """Name in study.json if no learning rate is chosen."""
        return f"{self.arms[0].name}-tuned"

    def scale_lr(self, factor: float) -> "Tuned":
        """Multiply all learning rates."""
        return replace(self, arms=tuple(arm.scale_lr(factor) for arm in self.arms))


def tuned(arm: Arm, lrs: Sequence[float]) -> Tuned:
    """Return an arm at the best of these learning rates."""
    return Tuned(tuple(replace(arm, lr=lr) for lr in lrs))


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
