"""The page of `deepcontrol demo`: two norms side by side, measured in one call."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ..imagefile import picture_uri
from .text import duration_text, join_words


@dataclass(frozen=True)
class Side:
    """One norm of the comparison."""

    name: str
    errors: tuple[float, ...]  # final share of wrong validation pixels, by seed
    milliseconds: float  # median training step
    saved_mib: float  # saved tensors of a forward pass


@dataclass(frozen=True)
class Comparison:
    """The figures of a demo, all measured in one call."""

    sides: tuple[Side, ...]
    seeds: tuple[int, ...]
    images: int
    epochs: int
    size: tuple[int, int]
    machine: str
    seconds: float  # duration of the demo


def comparison_lines(comparison: Comparison) -> dict[str, list[str]]:
    """Return the rows of the table: a name, and a value of each side."""
    seeds = join_words([str(seed) for seed in comparison.seeds])
    sides = comparison.sides
    return {
        "wrong validation pixels": [f"{100 * fmean(side.errors):.1f} %" for side in sides],
        f"of seeds {seeds}": [
            join_words([f"{100 * error:.1f}" for error in side.errors]) + " %" for side in sides
        ],
        "time of a training step": [f"{side.milliseconds:.1f} ms" for side in sides],
        "activation memory for the backward pass": [f"{side.saved_mib:.2f} MiB" for side in sides],
    }


def comparison_summary(comparison: Comparison) -> str:
    """Return the comparison in a sentence, whichever side it favors."""
    first, second = comparison.sides
    errors = fmean(first.errors), fmean(second.errors)
    return (
        f"At batch size 1, {first.name} ends at {100 * errors[0]:.1f}% wrong pixels and "
        f"{second.name} at {100 * errors[1]:.1f}%. A training step of {first.name} takes "
        f"{first.milliseconds / second.milliseconds:.2f} times the time of {second.name} on this "
        f"CPU, and its activations take {first.saved_mib / second.saved_mib:.2f} times the memory."
    )


def write_comparison_page(comparison: Comparison, picture: Path, folder: Path) -> Path:
    """Write index.html of a demo and return its path."""
    from .page import render  # needs Jinja and matplotlib, which training machines may lack

    return render(
        "comparison.html",
        folder,
        key="",
        refresh=None,
        comparison=comparison,
        lines=comparison_lines(comparison),
        summary=comparison_summary(comparison),
        picture=picture_uri(picture),
        duration=duration_text(comparison.seconds),
    )
