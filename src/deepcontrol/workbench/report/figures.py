"""What all charts share: colors that can be told apart, sober axes, and the way into a page."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

# Okabe and Ito's colors, which the color-blind can tell apart too; then the same with dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#444444", "#8b4fc4")
DASHES = ((), (6, 2), (2, 2), (6, 2, 2, 2))

INK, FAINT = "#1c2733", "#8794a3"
_STYLE: Any = {
    "font.size": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "svg.hashsalt": "deepcontrol",  # the same run folder, the same page
    "text.parse_math": False,  # a name may hold dollars
}


def line_style(index: int) -> tuple[str, tuple[int, ...]]:
    """Color and dashes of run `index`."""
    return COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, in this report's style."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def data_uri(figure: Figure) -> str:
    """A figure as an SVG that an <img> holds by itself."""
    return _as_uri(_svg(figure))


def save_figure(figure: Figure, path: Path, shaded: bool = False) -> str:
    """As path.svg and path.png; returns what data_uri does. A heat map is shaded, lines are not."""
    svg = _svg(figure)
    path.with_suffix(".svg").write_bytes(svg)
    figure.set_layout_engine("none")  # it is laid out by now, which takes as long as to draw it
    _save_png(figure, path.with_suffix(".png"), shaded)
    return _as_uri(svg)


def _save_png(figure: Figure, path: Path, shaded: bool) -> None:
    """In 256 colors, at less than half the bytes, unless there are shades: they would show."""
    file = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(file, format="png", dpi=150)
    picture = Image.open(file).convert("RGB")
    if not shaded:
        # Other methods give few pixels' colors away, such as those of a line in the legend alone.
        picture = picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def _svg(figure: Figure) -> bytes:
    with matplotlib.rc_context(_STYLE):
        file = io.BytesIO()
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    return file.getvalue()


def _as_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def plain(text: str) -> str:
    """A name that any font can draw."""
    return text.encode("ascii", "replace").decode()
