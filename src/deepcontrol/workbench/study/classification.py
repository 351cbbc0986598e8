"""The study's second part: claims and sweeps on classification and depth.

When the rules were fixed: before the first run of this part. Known at that time was an exploration
of agc, agc+wn, bn and gn on CIFAR-10 with a prototype, one seed per setting, 1 to 12 epochs.

Claims named ws-* and depth-ws-* are on agc+ws, AGC with standardized filters and lambda from 0.5.
They were added before the first run of agc+ws in this study. Known at that time was an exploration
of such filters in ResNet-20 at batch size 128 (benchmarks/results/residual-gap-cuda.csv), and all
other results of `cifar-batch`. ws-wsbn, the control with BatchNorm, was added after agc+ws had been
trained and before the first run of ws+bn. depth-ws-plain was added before the first run of a
network without shortcuts, and long-* before the first run of 200 epochs.

Each contender has its own best learning rate out of a grid that all contenders share (`Tuned`).
AGC stands for agc+wn, AGC with weight-normalized filters (AGC+WN in tables); the claim weight-norm
compares it with agc, and ws-wn with agc+ws (AGC+WS). In fully connected networks AGC is agc.

"No worse" means by less than half a point of error, half of "the same" in the first part.
"""

from collections.abc import Sequence

from ..models import Norm
from ..train.config import Model
from .arms import Arm, Tuned, model_label, tuned
from .claims import Claim, higher, no_worse
from .figure import SweepSpec
from .measures import FINAL
from .rules import BenchRatio, Check

CLOSE = 0.5  # points of error
LEARNS = 50.0  # % of error: a network that has learned to tell most classes apart
FLAT = 3.0  # points of error between batch 1 and batch 8


def claim(claim_id: str, text: str, *checks: Check | BenchRatio) -> Claim:
    """Return a claim of ours. The paper has no classification of images."""
    return Claim(claim_id, text, "not in the paper", checks, beyond_paper=True)


# Error by batch size

BATCH_LRS = {
    1: (0.003, 0.01, 0.03),
    2: (0.005, 0.015, 0.05),
    4: (0.007, 0.02, 0.07),
    8: (0.01, 0.03, 0.1),
    32: (0.03, 0.1, 0.3),
    128: (0.1, 0.3, 1.0),
}
SMALL, LARGE = (1, 2, 4, 8), (32, 128)
PEERS: dict[str, Norm] = {"gn": "gn", "frn": "frn", "evonorm": "evonorm-s0", "wsgn": "ws+gn"}
NAMES: dict[Norm, str] = {
    "agc+ws": "AGC+WS",
    "agc+wn": "AGC+WN",
    "agc": "AGC",
    "bn": "BatchNorm",
    "gn": "GroupNorm",
    "ln": "LayerNorm",
    "frn": "FRN",
    "evonorm-s0": "EvoNorm-S0",
    "ws+bn": "WS+BN",
    "ws+gn": "WS+GN",
    "none": "no normalization",
}


def at(norm: Norm, batch: int) -> Tuned:
    """Return ResNet-20 at its best learning rate for a batch size."""
    return tuned(Arm(norm, batch, 0.0, "resnet20"), BATCH_LRS[batch])


def below(norm: Norm, batches: Sequence[int], of: Norm = "agc+wn") -> list[Check]:
    """Require an error of AGC below that of another norm, at each batch size."""
    return [higher(at(norm, batch), at(of, batch)) for batch in batches]


def not_above(norm: Norm, batches: Sequence[int], of: Norm = "agc+wn") -> list[Check]:
    """Require an error of AGC that exceeds that of another norm by less than CLOSE."""
    checks = (no_worse(at(of, b), at(norm, b), by=CLOSE) for b in batches)
    return [check for each in checks for check in each]


def part(fixed_lambda: float | None = None, fixed_gamma: float | None = None) -> Arm:
    """Return ResNet-20 with AGC at batch size 128, with lambda or gamma fixed."""
    return Arm("agc+wn", 128, 0.3, "resnet20", fixed_lambda=fixed_lambda, fixed_gamma=fixed_gamma)


BATCH_CLAIMS = (
    claim(
        "batch-bn",
        "AGC's final error is below BatchNorm's at batch sizes 1 and 2",
        *below("bn", (1, 2)),
    ),
    claim(
        "batch-bn-middle",
        "AGC's final error is at most 0.5 points above BatchNorm's at batch sizes 4 and 8",
        *not_above("bn", (4, 8)),
    ),
    claim(
        "batch-large",
        "AGC's final error is at most 0.5 points above BatchNorm's at batch sizes 32 and 128",
        *not_above("bn", LARGE),
    ),
    *(
        claim(
            f"batch-{name}",
            f"AGC's final error is below that of {NAMES[norm]} at batch sizes 1, 2, 4 and 8",
            *below(norm, SMALL),
        )
        for name, norm in PEERS.items()
    ),
    claim(
        "batch-large-peers",
        "AGC's final error is at most 0.5 points above those of GroupNorm, FRN, EvoNorm-S0 and "
        "WS+GN at batch sizes 32 and 128",
        *(check for norm in PEERS.values() for check in not_above(norm, LARGE)),
    ),
    claim(
        "batch-flat",
        "From batch size 8 to 1, BatchNorm's final error rises by more than 3 points, and AGC's by "
        "less",
        higher(at("bn", 1), at("bn", 8), by=FLAT),
        *no_worse(at("agc+wn", 1), at("agc+wn", 8), by=FLAT),
    ),
    claim(
        "weight-norm",
        "Weight normalization lowers AGC's final error at batch sizes 8 and 128",
        *below("agc", (8, 128)),
    ),
    claim(
        "ws-bn",
        "With weight standardization, AGC's final error is below BatchNorm's at batch sizes 1 and "
        "2",
        *below("bn", (1, 2), of="agc+ws"),
    ),
    claim(
        "ws-bn-large",
        "With weight standardization, AGC's final error is at most 0.5 points above BatchNorm's at "
        "batch sizes 4, 8, 32 and 128",
        *not_above("bn", (4, 8, *LARGE), of="agc+ws"),
    ),
    claim(
        "ws-peers",
        "With weight standardization, AGC's final error is below those of GroupNorm, FRN and "
        "EvoNorm-S0 at batch sizes 1, 2, 4 and 8",
        *(
            check
            for name in ("gn", "frn", "evonorm")
            for check in below(PEERS[name], SMALL, of="agc+ws")
        ),
    ),
    claim(
        "ws-wsgn",
        "With weight standardization, AGC's final error is at most 0.5 points above that of WS+GN "
        "at all batch sizes",
        *not_above("ws+gn", (*SMALL, *LARGE), of="agc+ws"),
    ),
    claim(
        "ws-wsbn",
        "With weight standardization in both, AGC's final error is at most 0.5 points above "
        "BatchNorm's at batch sizes 8 and 128",
        *not_above("ws+bn", (8, 128), of="agc+ws"),
    ),
    claim(
        "ws-wn",
        "Weight standardization lowers AGC's final error against weight normalization at batch "
        "sizes 8 and 128",
        *below("agc+wn", (8, 128), of="agc+ws"),
    ),
    claim(
        "parts-lambda",
        "In ResNet-20 at batch size 128, subtracting the mean lowers the error by more than 1 "
        "point, and learning how much of it to subtract does no harm",
        higher(part(fixed_lambda=0.0), part(), by=1.0),
        *no_worse(part(), part(fixed_lambda=1.0), by=CLOSE),
    ),
    claim(
        "parts-gamma",
        "In ResNet-20 at batch size 128, learning the gain gamma lowers the error",
        higher(part(fixed_gamma=1.0), part()),
    ),
)

BATCH_SWEEP = SweepSpec(
    title="ResNet-20: error by batch size",
    x_label="batch size",
    series=tuple(
        (NAMES[norm], tuple((batch, at(norm, batch)) for batch in BATCH_LRS))
        for norm in ("agc+ws", "agc+wn", "agc", "bn", "ws+bn", *PEERS.values())
    ),
)


# Error by depth

DEPTH_LRS, UNNORMALIZED_LRS = (0.1, 0.3), (0.01, 0.03, 0.1)
RESIDUAL: dict[int, Model] = {20: "resnet20", 56: "resnet56", 110: "resnet110"}
PLAIN: dict[int, Model] = {20: "plain20", 56: "plain56", 110: "plain110"}


def deep(norm: Norm, model: Model) -> Tuned:
    """Return a network at its best learning rate for batch size 128."""
    lrs = UNNORMALIZED_LRS if norm == "none" else DEPTH_LRS
    return tuned(Arm(norm, 128, 0.0, model), lrs)


def deep_below(norm: Norm, models: Sequence[Model], by: float = 0.0) -> list[Check]:
    """Require AGC's error below another norm's by some points, in each network."""
    return [higher(deep(norm, model), deep("agc+wn", model), by=by) for model in models]


def deep_not_above(
    norm: Norm, models: Sequence[Model], by: float, of: Norm = "agc+wn"
) -> list[Check]:
    """Require AGC's error to exceed another norm's by less than some points."""
    checks = (no_worse(deep(of, model), deep(norm, model), by=by) for model in models)
    return [check for each in checks for check in each]


DEPTH_CLAIMS = (
    *(
        claim(
            f"depth-bn-{depth}",
            f"AGC's final error is at most 0.5 points above BatchNorm's in {model_label(model)}",
            *deep_not_above("bn", [model], CLOSE),
        )
        for depth, model in RESIDUAL.items()
    ),
    *(
        claim(
            f"depth-ws-bn-{depth}",
            "With weight standardization, AGC's final error is at most 0.5 points above "
            f"BatchNorm's in {model_label(model)}",
            *deep_not_above("bn", [model], CLOSE, of="agc+ws"),
        )
        for depth, model in RESIDUAL.items()
    ),
    claim(
        "depth-gn",
        "AGC's final error is below GroupNorm's in ResNet-20, ResNet-56 and ResNet-110",
        *deep_below("gn", list(RESIDUAL.values())),
    ),
    claim(
        "depth-none",
        "Without normalization, ResNet-110 diverges or ends more than 1 point above AGC",
        *deep_below("none", ["resnet110"], by=1.0),
    ),
    claim(
        "depth-none-shallow",
        "Without normalization, ResNet-20 and ResNet-56 diverge or end more than 1 point above AGC",
        *deep_below("none", ["resnet20", "resnet56"], by=1.0),
    ),
    claim(
        "depth-plain",
        "With AGC, networks of 20 and 56 layers learn without shortcuts: errors below 50%",
        *(
            Check(measure=FINAL, arm=deep("agc+wn", model), high=LEARNS)
            for model in (PLAIN[20], PLAIN[56])
        ),
    ),
    claim(
        "depth-plain-bn",
        "Without shortcuts, AGC's final error is at most 1 point above BatchNorm's at 20 layers",
        *deep_not_above("bn", ["plain20"], 1.0),
    ),
    claim(
        "depth-plain-deep",
        "Without shortcuts, AGC's final error is at most 1 point above BatchNorm's at 56 and 110 "
        "layers",
        *deep_not_above("bn", ["plain56", "plain110"], 1.0),
    ),
    claim(
        "depth-ws-plain",
        "With weight standardization and without shortcuts, AGC's final error is at most 1 point "
        "above BatchNorm's at 20, 56 and 110 layers",
        *deep_not_above("bn", list(PLAIN.values()), 1.0, of="agc+ws"),
    ),
    claim(
        "depth-plain-gn",
        "Without shortcuts, AGC's final error is below GroupNorm's at 20, 56 and 110 layers",
        *deep_below("gn", list(PLAIN.values())),
    ),
    claim(
        "depth-plain-none",
        "Without shortcuts, networks without normalization end more than 1 point above AGC at 20, "
        "56 and 110 layers",
        *deep_below("none", list(PLAIN.values()), by=1.0),
    ),
)


def _depth_sweep(title: str, models: dict[int, Model]) -> SweepSpec:
    norms: tuple[Norm, ...] = ("agc+ws", "agc+wn", "bn", "gn", "none")
    return SweepSpec(
        title=title,
        x_label="layers",
        series=tuple(
            (NAMES[norm], tuple((depth, deep(norm, model)) for depth, model in models.items()))
            for norm in norms
        ),
    )


DEPTH_SWEEPS = (
    _depth_sweep("ResNets, batch size 128: error by depth", RESIDUAL),
    _depth_sweep("Plain networks, batch size 128: error by depth", PLAIN),
)


# The usual number of epochs

PUBLISHED = 8.75  # % of error: ResNet-20 with BatchNorm in He et al., 2015
PUBLISHED_MARGIN = 0.75


def trained_long(norm: Norm) -> Tuned:
    """Return ResNet-20 at batch 128, at its better learning rate after 200 epochs."""
    return tuned(Arm(norm, 128, 0.0, "resnet20"), DEPTH_LRS)


LONG_CLAIMS = (
    claim(
        "long-ws-bn",
        "After 200 epochs, AGC's final error with weight standardization is at most 0.5 points "
        "above BatchNorm's in ResNet-20",
        *no_worse(trained_long("agc+ws"), trained_long("bn"), by=CLOSE),
    ),
    claim(
        "long-published",
        f"After 200 epochs, BatchNorm's final error in ResNet-20 is the published {PUBLISHED}%, "
        f"within {PUBLISHED_MARGIN} points",
        Check(
            measure=FINAL,
            arm=trained_long("bn"),
            low=PUBLISHED - PUBLISHED_MARGIN,
            high=PUBLISHED + PUBLISHED_MARGIN,
        ),
    ),
)

LONG_SWEEP = SweepSpec(
    title="ResNet-20, batch size 128, 200 epochs",
    x_label="layers",
    series=tuple((NAMES[norm], ((20, trained_long(norm)),)) for norm in ("agc+ws", "bn")),
)


# Fully connected layers

MLP_LRS = {64: (0.01, 0.03, 0.1), 4: (0.001, 0.003, 0.01)}
MLP_CLOSE = 0.3  # points of error


def mlp(norm: Norm, batch: int) -> Tuned:
    """Return the fully connected network at its best learning rate for a batch size."""
    return tuned(Arm(norm, batch, 0.0, "mlp"), MLP_LRS[batch])


MLP_CLAIMS = (
    claim(
        "mlp-none",
        "In fully connected layers, AGC lowers the final error at batch sizes 64 and 4",
        *(higher(mlp("none", batch), mlp("agc", batch)) for batch in MLP_LRS),
    ),
    claim(
        "mlp-ln",
        "In fully connected layers, AGC's final error is at most 0.3 points above LayerNorm's at "
        "batch sizes 64 and 4",
        *no_worse(mlp("agc", 64), mlp("ln", 64), by=MLP_CLOSE),
        *no_worse(mlp("agc", 4), mlp("ln", 4), by=MLP_CLOSE),
    ),
    claim(
        "mlp-bn",
        "In fully connected layers, AGC's final error is at most 0.3 points above BatchNorm's at "
        "batch size 64",
        *no_worse(mlp("agc", 64), mlp("bn", 64), by=MLP_CLOSE),
    ),
    claim(
        "mlp-bn-small",
        "In fully connected layers, AGC's final error is below BatchNorm's at batch size 4",
        higher(mlp("bn", 4), mlp("agc", 4)),
    ),
)

MLP_SWEEP = SweepSpec(
    title="Fully connected network: error by batch size",
    x_label="batch size",
    series=tuple(
        (NAMES[norm], tuple((b, mlp(norm, b)) for b in sorted(MLP_LRS)))
        for norm in ("agc", "bn", "ln", "none")
    ),
)
