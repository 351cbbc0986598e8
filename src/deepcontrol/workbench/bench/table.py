"""The rows as tables: times with their ratios to BatchNorm, ops with theirs to the floor."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from .contenders import NAMES
from .record import Row

Cell = tuple[str, ...]


def cell_of(row: Row) -> Cell:
    """What rows must share to be compared: network, size, batch, dtype, width."""
    return tuple(row[k] for k in ("group", "size", "batch", "dtype", "width"))


def title_of(row: Row) -> str:
    width = "" if row["width"] == "1" else f", width {row['width']}"
    return f"{row['group']} {row['size']}, batch {row['batch']}, {row['dtype']}{width}"


def cells(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The timed rows, those that are compared with each other together, as they first came."""
    timed = [row for row in rows if "ms_p50" in row or ("error" in row and "part" not in row)]
    order = list(dict.fromkeys(map(cell_of, timed)))
    ordered = sorted(timed, key=lambda row: (order.index(cell_of(row)), row_order(row)))
    for _, members in groupby(ordered, cell_of):
        yield list(members)


def row_order(row: Row) -> tuple[int, str]:
    contenders = list(NAMES)
    name = row["contender"]
    return (contenders.index(name) if name in contenders else len(contenders), row["engine"])


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One for each network and batch, then the ops, the shares, and the largest batches."""
    for members in cells(rows):
        yield step_table(members)
    if found := [row for row in rows if "us_p50" in row]:
        yield op_table(found)
    if found := [row for row in rows if "gpu_ms" in row]:
        yield share_table(found)
    if found := [row for row in rows if "largest_batch" in row]:
        yield fit_table(found)


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def step_table(members: Sequence[Row]) -> Table:
    timed = [row for row in members if "ms_p50" in row and row["contender"] == "bn"]
    eager = next((row for row in timed if row["engine"] == "eager"), None)
    fastest = min(timed, key=lambda row: float(row["ms_p50"]), default=None)
    memory = "saved MiB" if any("saved_mib" in row for row in members) else "activations MiB"
    columns = ("ms", "p20 to p80", "x BN eager", "x BN fastest", memory)
    table = new_table(title_of(members[0]), ("contender", "engine"), columns)
    for row in members:
        name = NAMES.get(row["contender"], row["contender"])
        if "error" in row:
            table.add_row(name, row["engine"], "failed", row["error"][:60])
            continue
        table.add_row(
            name,
            row["engine"],
            row["ms_p50"],
            f"{row['ms_p20']} to {row['ms_p80']}",
            ratio(row, eager),
            ratio(row, fastest),
            row.get("activations_mib", row.get("saved_mib", "")),
        )
    return table


def ratio(row: Row, peer: Row | None) -> str:
    """Of the medians; with ~ where the two are not of one call.

    >>> ratio({"ms_p50": "1", "run": "a"}, {"ms_p50": "2", "run": "b"})
    '~0.500'
    """
    if peer is None:
        return ""
    mark = "" if row.get("run") == peer.get("run") else "~"
    return f"{mark}{float(row['ms_p50']) / float(peer['ms_p50']):.3f}"


def op_table(rows: Sequence[Row]) -> Table:
    columns = ("batch", "us", "p20 to p80", "floor us", "x floor")
    table = new_table("each op alone, bf16, channels_last", ("op", "maps"), columns)
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


def share_table(rows: Sequence[Row]) -> Table:
    columns = ("GPU ms a step", "floor ms", "x floor")
    title = "where the GPU's time goes in a SegNet step"
    table = new_table(title, ("contender", "batch", "kernels"), columns)
    for row in rows:
        floor = row.get("floor_ms", "")
        times = f"{float(row['gpu_ms']) / float(floor):.2f}" if floor else ""
        name = NAMES.get(row["contender"], row["contender"])
        table.add_row(name, row["batch"], row["part"], row["gpu_ms"], floor, times)
    return table


def fit_table(rows: Sequence[Row]) -> Table:
    limit = rows[0]["limit_gib"]
    title = f"the largest batch of {rows[0]['size']} images that trains in {limit} GiB"
    table = new_table(title, ("contender",), ("largest batch",))
    for row in rows:
        table.add_row(NAMES.get(row["contender"], row["contender"]), row["largest_batch"])
    return table
