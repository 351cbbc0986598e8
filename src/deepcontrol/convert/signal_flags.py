"""Find faults in a model's signal: explosion, vanishing, dead layers and others.

The thresholds are set between healthy and broken networks at initialization, measured on random
images. The gradient's energy is its sum of squares at a layer's output, so that maps of different
sizes can be compared.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from .signal_measure import Measurement

FlagKind = Literal[
    "non-finite",
    "explosion",
    "vanishing",
    "gradient explosion",
    "gradient vanishing",
    "dead",
    "constant filters",
    "one position",
    "pooled mean",
]

# Variance, relative to the first layer's. BatchNorm ResNets of 20 to 110 layers reach 3 to 35 times
# as much; a ResNet-56 with AGC and all gains at 1 reaches 6e4 and diverges.
EXPLOSION = 1e3
# SegNet with AGC and He initialization falls to 2e-6, BatchNorm networks to no less than 0.1.
VANISHING = 1e-4
# Energy of the gradient, relative to the last layer's. BatchNorm reaches 6e3 in ResNet-110 and 6e4
# in ResNet-50; AGC with all gains at 1 reaches 4e6 in ResNet-56.
GRADIENT_EXPLOSION = 1e6
# BatchNorm ResNets keep 2e-3, SegNet with AGC 1e-4; SegNet without a norm keeps 1e-24.
GRADIENT_VANISHING = 1e-6
# Half of all ReLUs are open at initialization, and a few percent in sparse trained layers.
DEAD_OPEN_SHARE = 0.01
# Single dead filters are common; a quarter of a layer is a fault.
CONSTANT_SHARE = 0.25
# An AGC filter with lambda this close to 1 passes less than a twentieth of the mean of its map.
LAMBDA_NEAR_ONE = 0.05


@dataclass(frozen=True)
class SignalFlag:
    """A fault, with all layers that have it.

    Attributes:
        kind: Kind of fault, for example "explosion".
        layers: Indices of the layers in the report, in call order.
        message: Where and how much it is, and a remedy.
    """

    kind: FlagKind
    layers: tuple[int, ...]
    message: str


def find_flags(found: Sequence[Measurement]) -> tuple[SignalFlag, ...]:
    """Return all faults, at most one of each kind."""
    if not found:
        return ()
    explained = set(_one_position(found))  # such a layer outputs constants; one flag says it all
    flags = []
    for kind, test, message in _TESTS:
        layers = [i for i in test(found) if kind == "one position" or i not in explained]
        if layers:
            flags.append(SignalFlag(kind, tuple(layers), message(found, layers)))
    return tuple(flags)


def _trunk(found: Sequence[Measurement]) -> list[int]:
    """Return the layers in which a vanished signal is a fault.

    Residual branches may start small or at zero on purpose (a gain of 0, LayerScale), so a residual
    network is judged by its first and last layer and where its branches join.
    """
    additions = [i for i, m in enumerate(found) if m.kind == "add"]
    if len(additions) < 2:
        return list(range(len(found)))
    return sorted({0, *additions, len(found) - 1})


def _starts_at_zero(m: Measurement) -> bool:
    """Return whether all weights or all gains of a layer are zero."""
    scales = [getattr(m.module, name, None) for name in ("weight", "gain")]
    return any(isinstance(s, Tensor) and not bool(s.detach().any()) for s in scales)


def _last_zero_start(found: Sequence[Measurement]) -> int:
    """Return the last layer that starts at zero, or -1.

    No gradient reaches the layers before it.
    """
    return max((i for i, m in enumerate(found) if _starts_at_zero(m)), default=-1)


def _energy(m: Measurement) -> float | None:
    return None if m.gradient_square is None else m.gradient_square * math.prod(m.shape)


def _last_energy(found: Sequence[Measurement]) -> float:
    return next((e for m in reversed(found) if (e := _energy(m))), math.nan)


def _non_finite(found: Sequence[Measurement]) -> Iterator[int]:
    for i, m in enumerate(found):
        if not all(map(math.isfinite, (m.mean, m.variance, m.gradient_variance or 0.0))):
            yield i


def _explosion(found: Sequence[Measurement]) -> Iterator[int]:
    # max(1, ...): a small input does not make an ordinary variance an explosion.
    limit = EXPLOSION * max(1.0, found[0].variance)
    return (i for i, m in enumerate(found) if limit < m.variance < math.inf)


def _vanishing(found: Sequence[Measurement]) -> Iterator[int]:
    # min(1, ...): a norm after an input of large variance is no loss.
    limit = VANISHING * min(1.0, found[0].variance)
    for i in _trunk(found):
        if found[i].variance < limit and not _starts_at_zero(found[i]):
            yield i


def _gradient_explosion(found: Sequence[Measurement]) -> Iterator[int]:
    limit = GRADIENT_EXPLOSION * _last_energy(found)
    for i, m in enumerate(found):
        # A norm divides by the deviation of its input, which scales the gradient by the inverse.
        energy = (_energy(m) or 0.0) * min(1.0, m.variance)
        if limit < energy < math.inf:
            yield i


def _gradient_vanishing(found: Sequence[Measurement]) -> Iterator[int]:
    limit = GRADIENT_VANISHING * _last_energy(found)
    for i in _trunk(found):
        energy = (_energy(found[i]) or 0.0) * max(1.0, found[i].variance)
        if 0 < energy < limit:
            yield i


def _is_closed(m: Measurement) -> bool:
    return m.relu == "relu" and math.isfinite(m.mean) and (m.open_share or 0.0) < DEAD_OPEN_SHARE


def _dead(found: Sequence[Measurement]) -> Iterator[int]:
    trunk, zero_start = set(_trunk(found)), _last_zero_start(found)
    for i, m in enumerate(found):
        if _is_closed(m) or (m.gradient_square == 0 and i in trunk and i >= zero_start):
            yield i


def _constant_filters(found: Sequence[Measurement]) -> Iterator[int]:
    for i, m in enumerate(found):
        if (m.constant_share or 0.0) >= CONSTANT_SHARE and not _starts_at_zero(m):
            yield i


def _removes_mean(module: nn.Module | None) -> bool:
    """Return whether lambda of most filters is near 1."""
    lam = getattr(module, "mean_scale", None)
    if getattr(module, "shared_means", None) is not None:
        return False
    near = 1.0 if lam is None else ((1 - lam.detach()).abs() < LAMBDA_NEAR_ONE).float().mean()
    return bool(near > 0.5)


def _one_position(found: Sequence[Measurement]) -> Iterator[int]:
    for i, m in enumerate(found):
        if m.kind == "agc" and m.positions == 1 and _removes_mean(m.module):
            yield i


def _pooled_mean(found: Sequence[Measurement]) -> Iterator[int]:
    for i, m in enumerate(found):
        linear = getattr(m.module, "activation", "none") == "none"
        if m.kind == "agc" and m.globally_pooled and linear and _removes_mean(m.module):
            yield i


def _name(m: Measurement) -> str:
    return repr(m.name) if m.name else "the model"


def _where(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    """Name the first of the layers, and how many follow."""
    return _name(found[layers[0]]) + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")


def _non_finite_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    forward = [i for i in layers if not math.isfinite(found[i].variance)]
    if forward:
        return f"NaN or infinity in the output of {_where(found, forward)}"
    # The backward pass meets the last of the layers first.
    return f"NaN or infinity in the gradient at {_where(found, layers[::-1])}"


def _explosion_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    most = max(layers, key=lambda i: found[i].variance)
    text = (
        f"the variance is {found[most].variance:.1e} at {_name(found[most])}, "
        f"{found[0].variance:.1e} at the first layer; it exceeds the limit at "
        f"{_where(found, layers)}. "
    )
    branches = sum(m.kind == "add" for m in found)
    if branches < 2:
        return text + "Lower the gains, or scale the filters with unit_init_"
    gain = f"1/sqrt({branches}) = {1 / math.sqrt(branches):.2f}"
    return text + f"Start the last gain of each residual branch at {gain} instead of 1"


def _vanishing_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    least = min(layers, key=lambda i: found[i].variance)
    return (
        f"the variance is {found[least].variance:.1e} at {_name(found[least])}, "
        f"{found[0].variance:.1e} at the first layer. The model may learn slowly at first; "
        "unit_init_ scales the filters so that the signal keeps its variance"
    )


def _gradient_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    last = _last_energy(found)
    most = max(layers, key=lambda i: abs(math.log((_energy(found[i]) or 1.0) / last)))
    ratio = (_energy(found[most]) or 0.0) / last
    return (
        f"the gradient's sum of squares at {_name(found[most])} is {ratio:.1e} times "
        "the last layer's"
    )


def _dead_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    closed = [i for i in layers if _is_closed(found[i])]
    starved = [i for i in layers if i not in closed]
    parts = []
    if closed:
        where = _where(found, closed)
        parts.append(f"fewer than {DEAD_OPEN_SHARE:.0%} of the ReLUs are open at {where}")
    if starved:
        parts.append(f"no gradient arrives at {_where(found, starved)}")
    return "; ".join(parts)


def _constant_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    most = max(layers, key=lambda i: found[i].constant_share or 0.0)
    return (
        f"{found[most].constant_share:.0%} of the filters of {_name(found[most])} "
        f"output the same value for all samples and positions ({_where(found, layers)})"
    )


def _one_position_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    return (
        f"{_where(found, layers)}: AGC on maps of one position, where the mean is the value "
        "itself, so that only the bias is left. Start lambda at 0: "
        "torch.nn.init.zeros_(layer.mean_scale)"
    )


def _pooled_message(found: Sequence[Measurement], layers: Sequence[int]) -> str:
    return (
        f"{_where(found, layers)}: global average pooling follows AGC with lambda near 1, so the "
        "pooled features are the biases whatever the input. Start lambda at 0: "
        "torch.nn.init.zeros_(layer.mean_scale)"
    )


_Test = Callable[[Sequence[Measurement]], Iterator[int]]
_Message = Callable[[Sequence[Measurement], Sequence[int]], str]
_TESTS: tuple[tuple[FlagKind, _Test, _Message], ...] = (
    ("non-finite", _non_finite, _non_finite_message),
    ("explosion", _explosion, _explosion_message),
    ("vanishing", _vanishing, _vanishing_message),
    ("gradient explosion", _gradient_explosion, _gradient_message),
    ("gradient vanishing", _gradient_vanishing, _gradient_message),
    ("dead", _dead, _dead_message),
    ("constant filters", _constant_filters, _constant_message),
    ("one position", _one_position, _one_position_message),
    ("pooled mean", _pooled_mean, _pooled_message),
)
