"""Results of the benchmark: their CSV files, tables and chart."""

import csv
import datetime
import hashlib
import importlib.metadata
import io
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.table import Table

from ..folders.storage import open_append, replacing, write_atomic
from ..hardware import hardware

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, str]

# Written last, in this order.
PROVENANCE = (
    "hardware", "cores", "python", "torch", "cuda", "cudnn", "triton", "source", "run", "date",
)  # fmt: skip
# Values in files of earlier versions, by column.
RENAMED = {
    "group": {"fit": "max-batch", "shares": "profile"},
    "part": {"optimiser": "optimizer"},
}
CONTENDER_NAMES = {
    "agc": "AGC",
    "one-liner": "AGC, plain PyTorch",
    "bn": "BatchNorm",
    "bn-byte-pool": "BatchNorm, byte pooling",
    "bn-folded": "BatchNorm, folded",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "frn": "FRN",
    "evonorm-s0": "EvoNorm-S0",
    "none": "no normalization",
}
GROUP_NAMES = {
    "segnet": "SegNet",
    "resnet50": "ResNet-50",
    "unet3d": "3-D U-Net",
    "nnunet": "nnU-Net",
    "nnunet-res": "nnU-Net, residual encoder",
    "neuron": "One neuron, training",
    "inference": "One neuron, inference",
}
ENGINE_NAMES = {
    "eager": "eager",
    "compile": "torch.compile",
    "reduce-overhead": "torch.compile, reduce-overhead",
    "graphed": "graphed model, own loop",
    "graph": "CUDA graph",
    "compile+graph": "torch.compile + CUDA graph",
}
ENGINE_COLORS = {
    "eager": "#9aa5b1",
    "compile": "#5b8db8",
    "reduce-overhead": "#8fb5d3",
    "graphed": "#f0cd85",
    "graph": "#e0a030",
    "compile+graph": "#b5482f",
}
MEMORY_COLUMNS = ("activations_mib", "saved_mib")


def versions(device: str) -> Row:
    """Return the versions of the software that a time depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        try:
            found["triton"] = importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            found["triton"] = "none"
    return found


def provenance(device: str) -> Row:
    """Return hardware, core count, versions and date, as columns."""
    return {
        "hardware": hardware(device),
        "cores": str(os.cpu_count()),
        **versions(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def source_hash() -> str:
    """Return a short hash of the source code that is measured."""
    package = Path(__file__).parents[2]
    files = sorted(
        path
        for part in ("ops", "nn", "workbench/models")
        for path in (package / part).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    )
    files += [package / "graphed_model.py", package / "step.py"]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def read_rows(path: Path) -> list[Row]:
    """Read a CSV; empty cells are dropped from the rows. A missing file has no rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {k: RENAMED.get(k, {}).get(v, v) for k, v in row.items() if v}
            for row in csv.DictReader(file)
        ]


def has_row(path: Path, key: Mapping[str, object]) -> bool:
    """Check whether a CSV has a row with all these values."""
    return any(all(row.get(k) == str(v) for k, v in key.items()) for row in read_rows(path))


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as CSV. The file is replaced atomically."""
    found = dict.fromkeys(key for row in rows for key in row)
    columns = [c for c in found if c not in PROVENANCE] + [c for c in PROVENANCE if c in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue(), inside=path.parent)


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a row to a CSV file, so that several processes can share it."""
    is_new = not path.exists()
    with open_append(path, inside=path.parent) as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def write_results(
    path: Path, rows: Sequence[Mapping[str, object]], device: str, append: bool = False
) -> None:
    """Write rows with their provenance as CSV; append=True keeps existing rows."""
    here, before = provenance(device), read_rows(path) if append else []
    write_rows(path, [*before, *({**row, **here} for row in rows)])
    print(f"Wrote {path}")


def cell_of(row: Row) -> tuple[str, ...]:
    """Return the values that comparable rows share, such as network and batch."""
    # Files of earlier versions have no layout.
    shared = ("group", "size", "batch", "dtype", "width")
    return *(row[k] for k in shared), row.get("layout", "channels_last")


def cells(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Group the timed rows by cell, in the order in which cells first appear."""
    timed = [row for row in rows if "ms_p50" in row or ("error" in row and "part" not in row)]
    order = list(dict.fromkeys(map(cell_of, timed)))
    ordered = sorted(timed, key=lambda row: (order.index(cell_of(row)), _row_order(row)))
    for _, members in groupby(ordered, cell_of):
        yield list(members)


def _row_order(row: Row) -> tuple[int, int]:
    known = (list(CONTENDER_NAMES), row["contender"]), (list(ENGINE_NAMES), row["engine"])
    contender, engine = (names.index(n) if n in names else len(names) for names, n in known)
    return contender, engine


def cell_title(row: Row) -> str:
    """Name a row's cell.

    >>> row = {"group": "segnet", "size": "256x512", "batch": "8", "dtype": "bf16", "width": "1"}
    >>> cell_title(row)
    'SegNet, 256x512, batch 8, bf16'
    """
    width = "" if row["width"] == "1" else f", width {row['width']}"
    group = GROUP_NAMES.get(row["group"], row["group"])
    layout = ", contiguous" if row.get("layout") == "contiguous" else ""
    return f"{group}, {row['size']}, batch {row['batch']}, {row['dtype']}{width}{layout}"


def contender_name(row: Row) -> str:
    return CONTENDER_NAMES.get(row["contender"], row["contender"])


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield a table per cell, then those of the ops, profile and largest batch."""
    for members in cells(rows):
        yield step_table(members)
    if found := [row for row in rows if "us_p50" in row]:
        yield op_table(found)
    if found := [row for row in rows if "gpu_ms" in row]:
        yield profile_table(found)
    if found := [row for row in rows if "largest_batch" in row]:
        yield max_batch_table(found)


def _new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name, no_wrap=True, vertical="bottom")
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def step_table(members: Sequence[Row]) -> Table:
    """Compare the step times and the memory of one cell with BatchNorm's."""
    timed = [row for row in members if "ms_p50" in row and row["contender"] == "bn"]
    eager = next((row for row in timed if row["engine"] == "eager"), None)
    fastest = min(timed, key=lambda row: float(row["ms_p50"]), default=None)
    columns = [
        "step time\n(ms)",
        "p20 to p80\n(ms)",
        "time vs.\nBatchNorm,\neager",
        "time vs.\nBatchNorm,\nfastest",
    ]
    if any("activations_mib" in row for row in members):
        columns.append("activations\n(MiB)")
    elif any("saved_mib" in row for row in members):
        columns.append("saved for\nbackward\n(MiB)")
    table = _new_table(cell_title(members[0]), ("contender", "engine"), columns)
    for row in members:
        name = contender_name(row)
        if "error" in row:
            table.add_row(name, row["engine"], "failed", row["error"][:60])
            continue
        values = (
            name,
            row["engine"],
            row["ms_p50"],
            f"{row['ms_p20']} to {row['ms_p80']}",
            ratio(row, eager),
            ratio(row, fastest),
            row.get("activations_mib", row.get("saved_mib", "")),
        )
        table.add_row(*values[: len(table.columns)])
        if any(value.startswith("~") for value in values):
            table.caption = "~ compares two different runs of the benchmark"
    return table


def ratio(row: Row, peer: Row | None) -> str:
    """Return the ratio of two medians, marked with ~ if they are from different runs.

    >>> ratio({"ms_p50": "1", "run": "a"}, {"ms_p50": "2", "run": "b"})
    '~0.500'
    """
    if peer is None:
        return ""
    mark = "" if row.get("run") == peer.get("run") else "~"
    return f"{mark}{float(row['ms_p50']) / float(peer['ms_p50']):.3f}"


def op_table(rows: Sequence[Row]) -> Table:
    """Compare the time of each op with its bandwidth floor."""
    columns = ("batch", "time\n(µs)", "p20 to p80\n(µs)", "bandwidth\nfloor (µs)", "time /\nfloor")
    table = _new_table("Each op alone, bf16, channels_last", ("op", "shape"), columns)
    for row in rows:
        table.add_row(
            row["contender"],
            row["size"],
            row["batch"],
            row["us_p50"],
            f"{row['us_p20']} to {row['us_p80']}",
            row["floor_us"],
            f"{float(row['us_p50']) / float(row['floor_us']):.2f}",
        )
    return table


def profile_table(rows: Sequence[Row]) -> Table:
    """List the GPU time per kind of kernel."""
    columns = ("GPU time\nper step (ms)", "bandwidth\nfloor (ms)", "time /\nfloor")
    title = "GPU time of a SegNet step by kind of kernel"
    table = _new_table(title, ("contender", "batch", "kernels"), columns)
    for row in rows:
        floor = row.get("floor_ms", "")
        times = f"{float(row['gpu_ms']) / float(floor):.2f}" if floor else ""
        table.add_row(contender_name(row), row["batch"], row["part"], row["gpu_ms"], floor, times)
    return table


def max_batch_table(rows: Sequence[Row]) -> Table:
    """List the largest batch per contender."""
    limit = rows[0]["limit_gib"]
    title = f"Largest batch in {limit} GiB (SegNet, {rows[0]['size']})"
    table = _new_table(title, ("contender",), ("largest batch",))
    for row in rows:
        table.add_row(contender_name(row), row["largest_batch"])
    return table


def draw_chart(rows: Sequence[Row], path: Path) -> bool:
    """Draw step time and memory by contender and engine, one row of panels per cell.

    A ~ marks values from an earlier run than the latest of their panel.

    Returns:
        Whether there are timed steps to draw.
    """
    from matplotlib.figure import Figure  # here, because a training machine may lack matplotlib
    from matplotlib.patches import Patch

    panels = [timed for members in cells(rows) if (timed := [r for r in members if "ms_p50" in r])]
    if not panels:
        return False
    heights = [1.1 + 0.2 * len(members) for members in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 2, height_ratios=heights, squeeze=False)
    for (left, right), members in zip(axes, panels, strict=True):
        draw_times(left, members)
        draw_memory(right, members)
    engines = [
        engine for engine in ENGINE_COLORS if any(r["engine"] == engine for m in panels for r in m)
    ]
    handles = [Patch(color=ENGINE_COLORS[engine], label=ENGINE_NAMES[engine]) for engine in engines]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(engines), frameon=False)
    with replacing(path, inside=path.parent) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=120)
    return True


def draw_times(axes: "Axes", members: Sequence[Row]) -> None:
    """Draw the median step times with whiskers from p20 to p80."""
    p20, p50, p80 = ([float(row[f"ms_p{p}"]) for row in members] for p in (20, 50, 80))
    below = [b - a for a, b in zip(p20, p50, strict=True)]
    above = [b - a for a, b in zip(p50, p80, strict=True)]
    whiskers = {"xerr": [below, above], "error_kw": {"elinewidth": 1.0, "capsize": 2}}
    draw_bars(axes, members, p50, **whiskers)
    axes.set_title(cell_title(members[0]), loc="left", fontsize=10)
    axes.set_xlabel("step time, ms (median; whiskers: p20 to p80)", fontsize=8)


def draw_memory(axes: "Axes", members: Sequence[Row]) -> None:
    """Draw the memory of a step; nothing for inference, which saves no tensors."""
    values = [float(next((row[k] for k in MEMORY_COLUMNS if k in row), 0)) for row in members]
    if not any(values):
        axes.set_axis_off()
        return
    draw_bars(axes, members, values)
    saved = any("saved_mib" in row for row in members)
    axes.set_xlabel("saved for backward, MiB" if saved else "activations, MiB", fontsize=8)


def draw_bars(
    axes: "Axes", members: Sequence[Row], values: Sequence[float], **more: object
) -> None:
    """Draw a bar per row. The engines of a contender share one label."""
    at: list[float] = []
    ticks: dict[str, list[float]] = {}
    y = 0.0
    for i, row in enumerate(members):
        y += 1.0 if i and row["contender"] == members[i - 1]["contender"] else 1.5
        at.append(y)
        ticks.setdefault(contender_name(row), []).append(y)
    colors = [ENGINE_COLORS.get(row["engine"], "black") for row in members]
    axes.barh(at, values, height=0.9, color=colors, **more)  # type: ignore[arg-type]
    axes.set_yticks([sum(ys) / len(ys) for ys in ticks.values()], list(ticks), fontsize=8)
    axes.invert_yaxis()
    latest = max(row.get("run", "") for row in members)
    marks = ["" if row.get("run", "") == latest else "~" for row in members]  # as in the table
    labels = [f"{mark}{v:.4g}" for mark, v in zip(marks, values, strict=True)]
    axes.bar_label(axes.containers[-1], labels, fontsize=7, padding=3)  # type: ignore[arg-type]
    axes.margins(x=0.15)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
