"""Report how the signal and its gradient propagate through a model."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn

from .signal_flags import FlagKind, SignalFlag, find_flags
from .signal_measure import Kind, Measurement, measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RED, _INK, _FAINT = "#c8321e", "#1c2733", "#aab4be"
_STYLE = {
    "font.size": 10.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
}


@dataclass(frozen=True)
class LayerSignal:
    """The signal at the output of one layer, in one call.

    Attributes:
        name: Name of the module, or of the module whose code calls the function and the function.
        call: 1 for the first call of this name, 2 for the second and so on.
        kind: "conv", "linear", "norm", "agc", "activation", "add" (two branches join) or "other".
        layer: Class of the module with its fused activation, or the function.
        shape: Shape of the output.
        mean: Mean of the output over all elements.
        variance: Variance of the output over all elements.
        open_share: Share of outputs above 0, for layers that end with a ReLU; otherwise None.
        constant_share: Share of filters with the same output for all samples and positions; None
            if the layer has no filters or too few values.
        gradient_variance: Variance of the gradient at the output, or None if none arrived.
        flags: Kinds of the flags of the report that concern this layer.
    """

    name: str
    call: int
    kind: Kind
    layer: str
    shape: tuple[int, ...]
    mean: float
    variance: float
    open_share: float | None
    constant_share: float | None
    gradient_variance: float | None
    flags: tuple[FlagKind, ...]


@dataclass(frozen=True)
class SignalReport:
    """All layers of a model in call order, and the faults. Print it for a table.

    Attributes:
        layers: One LayerSignal per call of a layer.
        flags: The faults, each with its layers and a message. Empty for a healthy model.
    """

    layers: tuple[LayerSignal, ...]
    flags: tuple[SignalFlag, ...]

    def __iter__(self) -> Iterator[LayerSignal]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> LayerSignal:
        return self.layers[index]

    def __str__(self) -> str:
        header = ("layer", "type", "output", "mean", "variance", "open", "gradient", "flags")
        rows = [header, *map(_cells, self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = []
        for row in rows:
            words = [cell.ljust(w) for cell, w in zip(row[:3], widths[:3], strict=True)]
            numbers = [cell.rjust(w) for cell, w in zip(row[3:7], widths[3:7], strict=True)]
            lines.append("  ".join([*words, *numbers, row[7]]).rstrip())
        lines += [f"{flag.kind}: {flag.message}" for flag in self.flags]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        parts = [f"{len(self)} layers"]
        if self.layers:
            first, last = self.layers[0], self.layers[-1]
            parts.append(f"variance {_number(first.variance)} to {_number(last.variance)}")
        parts.append(", ".join(flag.kind for flag in self.flags) or "no flags")
        return "; ".join(parts)

    def plot(
        self,
        to: "str | os.PathLike[str] | Sequence[Axes]",
        *,
        open_share: bool = False,
        label: str | None = None,
    ) -> None:
        """Draw the signal propagation plot: variances over depth on a logarithmic axis.

        The panels are the variance of the outputs, the variance of their gradients and, optionally,
        the share of open ReLUs. Large dots are additions of residual branches, joined by a line;
        red ones are layers with flags. Needs matplotlib.

        Args:
            to: File to write (its suffix chooses the format), or two axes, or three with
                open_share=True, to draw into. Draw several reports into the same axes to compare.
            open_share: Also draw the share of open ReLUs.
            label: Name of the curve, for a legend.
        """
        try:
            if isinstance(to, (str, os.PathLike)):
                _draw_file(self.layers, to, open_share, label)
            else:
                _draw(self.layers, to, open_share, label)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "SignalReport.plot needs matplotlib, which is not installed: pip install matplotlib"
            ) from error


def signal_report(
    model: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None = None
) -> SignalReport:
    """Measure the signal and its gradient at every layer of a model.

    The model runs once forward and backward on the example, in its current mode. Convolutions,
    linear layers, norms, AGC layers, activations, other layers with parameters and the additions of
    residual branches are reported in the order of their calls. This is the signal propagation plot
    of Brock et al. (2021), with the gradient.

    Nothing changes: buffers (BatchNorm's statistics), gradients and random number generators are
    restored. Call it before the first step to check the initialization, and during training to
    find layers that have died. torch.compile's and DDP's wrappers are taken off; the layers then
    run in eager mode. Inside of torch.autocast the model runs in autocast's precision.

    Args:
        model: Any model, with or without AGC.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. Use real
            images and a batch of the size that you train with: the report is about them.
        loss: loss(outputs) returns the number that the backward pass starts from. By default every
            output gets a random gradient of mean 0 and variance 1, always the same one.

    Returns:
        A SignalReport: iterate over its layers, print it for a table, `plot` it, and read its
        `flags`. These are "explosion", "vanishing", "gradient explosion", "gradient vanishing",
        "dead", "constant filters", "non-finite", "one position" (AGC on maps of one position) and
        "pooled mean" (AGC before global average pooling).

    Raises:
        ValueError: If the model is TorchScript, the outputs have no differentiable tensor, or the
            loss is not one differentiable number.

    Reference:
        Brock, De, Smith, "Characterizing signal propagation to close the performance gap in
        unnormalized ResNets", ICLR 2021. https://arxiv.org/abs/2101.08692

    >>> import torch
    >>> from deepcontrol import AGCConv2d
    >>> model = nn.Sequential(AGCConv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> report = signal_report(model, torch.randn(2, 3, 16, 16))
    >>> [(layer.name, layer.layer, layer.shape) for layer in report]
    [('0', 'AGCConv2d (relu)', (2, 8, 14, 14))]
    >>> report.flags
    ()
    """
    found = measure(model, example, loss)
    flags = find_flags(found)
    return SignalReport(tuple(_layer(i, m, flags) for i, m in enumerate(found)), flags)


def _layer(index: int, m: Measurement, flags: Sequence[SignalFlag]) -> LayerSignal:
    return LayerSignal(
        name=m.name,
        call=m.call,
        kind=m.kind,
        layer=m.layer,
        shape=m.shape,
        mean=m.mean,
        variance=m.variance,
        open_share=m.open_share,
        constant_share=m.constant_share,
        gradient_variance=m.gradient_variance,
        flags=tuple(flag.kind for flag in flags if index in flag.layers),
    )


def _cells(layer: LayerSignal) -> tuple[str, ...]:
    return (
        (layer.name or "(the model)") + (f" #{layer.call}" if layer.call > 1 else ""),
        layer.layer,
        "x".join(map(str, layer.shape)),
        _number(layer.mean),
        _number(layer.variance),
        "" if layer.open_share is None else f"{layer.open_share:.0%}",
        "" if layer.gradient_variance is None else _number(layer.gradient_variance),
        ", ".join(layer.flags),
    )


def _number(value: float) -> str:
    """Format a number in three digits, with an exponent only where it helps.

    >>> _number(0.1234), _number(33021.0), _number(0.0)
    ('0.123', '3.30e+04', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.2e}"


@dataclass(frozen=True)
class _Panel:
    """A number of each layer, drawn in red where one of these flags concerns it."""

    title: str
    value: Callable[[LayerSignal], float | None]
    flags: frozenset[str]
    linear: bool = False


_PANELS = (
    _Panel(
        "Variance of the output",
        lambda layer: layer.variance,
        frozenset(get_args(FlagKind)) - {"gradient explosion", "gradient vanishing"},
    ),
    _Panel(
        "Variance of the gradient",
        lambda layer: layer.gradient_variance,
        frozenset({"gradient explosion", "gradient vanishing", "non-finite"}),
    ),
    _Panel("Share of open ReLUs", lambda layer: layer.open_share, frozenset({"dead"}), linear=True),
)


def _draw_file(
    layers: Sequence[LayerSignal],
    path: str | os.PathLike[str],
    open_share: bool,
    label: str | None,
) -> None:
    """Draw the panels into a file."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = 3 if open_share else 2
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.6 * panels, 3.4), layout="constrained")
        axes = list(figure.subplots(1, panels))
        _draw(layers, axes, open_share, label)
        if label is not None:
            axes[0].legend(frameon=False)
        figure.savefig(path, dpi=150)


def _draw(
    layers: Sequence[LayerSignal], axes: "Sequence[Axes]", open_share: bool, label: str | None
) -> None:
    """Draw one curve into each of the axes."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    panels = _PANELS if open_share else _PANELS[:2]
    if len(axes) != len(panels):
        raise ValueError(
            f"expected {len(panels)} axes with open_share={open_share}, got {len(axes)}: pass one "
            "for each of " + ", ".join(panel.title.lower() for panel in panels)
        )
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, layers, panel, label)
        ax.set_title(panel.title)
        ax.set_xlabel("layer, in the order of the calls")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(axis="y", color=_FAINT, alpha=0.4, linewidth=0.6)
        if panel.linear:
            ax.set_ylim(0, 1)
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:
            ax.set_yscale("log")


def _draw_panel(
    axes: "Axes", layers: Sequence[LayerSignal], panel: _Panel, label: str | None
) -> None:
    # Zeros, NaN and layers without a value have no place on the axis.
    points = [
        (depth, y, layer)
        for depth, layer in enumerate(layers, 1)
        if (y := panel.value(layer)) is not None and math.isfinite(y) and (y > 0 or panel.linear)
    ]
    # In a residual network the branches lie below the sums: a line through all would be a zigzag.
    is_residual = sum(layer.kind == "add" for layer in layers) > 1
    on_line = [p for p in points if p[2].kind == "add"] if is_residual else points
    depths, values = [p[0] for p in on_line], [p[1] for p in on_line]
    (line,) = axes.plot(depths, values, "-", linewidth=1.0, alpha=0.55, label=label)
    color = line.get_color()
    for is_addition, size in ((False, 5.0), (True, 20.0)):
        shown = [p for p in points if (p[2].kind == "add") == is_addition]
        colors = [_RED if panel.flags & set(layer.flags) else color for _, _, layer in shown]
        axes.scatter([p[0] for p in shown], [p[1] for p in shown], size, colors, zorder=3)
