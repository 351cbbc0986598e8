"""Format the tables of the zoo as a page of the documentation."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

Row = dict[str, str]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "zoo.md"
TABLE = ROOT / "benchmarks" / "results" / "zoo.csv"
TRICKY = ROOT / "benchmarks" / "results" / "tricky.csv"

_PAGE = """\
# AGC in models of other libraries

`to_agc(model, example=image)` converts {models} untrained models of {libraries} libraries to AGC
(automatic gain control) and checks the result. [Other libraries](plugins/index.md) shows how to
convert each library's models. `make zoo` measures the models;
`python -m benchmarks.zoo --report` writes this page from `benchmarks/results/zoo.csv`.

| | |
|---|---|
| BatchNorms | {norms} |
| fused with their convolution into one neuron | {fused} |
| replaced by an AGC layer (the report of `to_agc` gives the reason) | {replaced} |
| skipped | {skipped} |
| models that the [self-check](reference/convert.md#the-conversion-checks-itself) verified in both \
modes | {verified} of {models} |
| fusions that the self-check backed out | {backed_out} in {backed_out_models} models |
| largest change by `to_agc(init="bn")`, fp64 | {bn_start_fp64} of the largest output |
| largest change by `fold`, fp64 | {fold_fp64} of the largest output |
| bytes saved for backward, compared with BatchNorm | {middle:.2f}x (median; {lowest:.2f}x to \
{highest:.2f}x) |
| time of a conversion | {seconds:.1f} s (median; {fastest:.1f} to {slowest:.1f} s), \
{forwards:.0f} forward passes of these small inputs (median) |
| training step at batch 1 runs and is finite, AGC | {finite} of {models} |
| training step at batch 1 runs, BatchNorm (refuses maps of one position) | {accepted} of {models} |
{failed}
- **saved for backward**: bytes that autograd saves at batch 2 without the parameters
  (`deepcontrol.nn.saved_bytes`), with BatchNorm and after the conversion. Where BatchNorm comes
  before its convolution (resnetv2, DenseNet, SegResNet), it cannot be fused. LeViT's BatchNorms
  follow linear layers and see maps of one position. There AGC is an affine map, and its saved mean
  is as large as its input. Exclude such layers with `where`.
- **from BN**: difference between `to_agc(init="bn")` and BatchNorm in eval mode and fp64, divided
  by the largest output value. The BatchNorms have the statistics of one batch.
- **fold**: the same between `fold(model)` and the model, after `to_agc(init="bn")` with lambda
  drawn from N(0.8, 0.2) for each filter. The CSV has both in fp32 too, with the model's own
  rounding in fp32, and for `init="paper"`.
- **self-check**: whether the conversion was verified on the example in eval and training mode, and
  the fusions that it backed out.
- **time**: CPU time of `to_agc(init="bn", example=image)` on one thread, self-check included.
- **batch 1**: whether a training step at batch 1 runs and is finite, with BatchNorm and with AGC.

| model | input | BatchNorms: fused / replaced / skipped | self-check | time, s \
| saved for backward, MiB | | from BN | fold | batch 1: BN, AGC |
|---|---|---|---|---|---|---|---|---|---|
{table}

Measured {dates} with {packages}; torch {torch}, Python {python}, {hardware}.

`make zoo` installs these libraries: those of `locks/zoo.lock`, which the tests use too, and
those of `locks/zoo-more.lock` into a folder of their own. A library that is not installed is
left out; its rows in the CSV stay. `--only ultralytics --fresh` measures some models again.

## Structures that mislead a converter

{structures} small models are made to mislead a converter: branches that a tracer does not take,
layers in plain lists, closures and globals, hooks, patched instances, tied, pruned and parametrized
gains. `python -m tests.convert.campaign` converts each of them, and writes
`benchmarks/results/tricky.csv` and the table. With an example, {wrong} of {structures} are wrong:
the outputs stay the same in eval and training mode, all new layers are called and trained, and no
removed one is called. Where this is not possible, the BatchNorm stays, with a warning. Without an
example the report says that nothing was verified; {differ} models then compute something else, or
raise.

| structures | models | BatchNorms: fused / replaced / kept | fusions backed out | wrong \
| not the same without an example |
|---|---|---|---|---|---|
{groups}
"""


def page(rows: Sequence[Row], tricky: Sequence[Row]) -> str:
    """Format the rows of both CSV files as Markdown, with a summary."""
    good = [row for row in rows if "error" not in row]
    ratios = [_ratio(row) for row in good]
    seconds = [float(r["conversion_s"]) for r in good]
    backed_out = [n for r in good if (n := int(r["backed_out"]))]
    differ = [r for r in tricky if r["without_example"] != "same"]
    return _PAGE.format(
        models=len(rows),
        libraries=len({r["library"] for r in rows}),
        **{k: _sum(good, k) for k in ("norms", "fused", "replaced", "skipped")},
        verified=sum(r["verified"] == "True" for r in good),
        backed_out=sum(backed_out),
        backed_out_models=len(backed_out),
        finite=sum(r["finite_at_1"] == "True" for r in good),
        accepted=sum(r["bn_trains_at_1"] == "True" for r in good),
        middle=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        seconds=median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        forwards=median(float(r["conversion_s"]) / float(r["forward_s"]) for r in good),
        fold_fp64=_largest(good, "fold_fp64"),
        bn_start_fp64=_largest(good, "bn_start_fp64"),
        failed="".join(f"| {_name(r)} failed | {r['error']} |\n" for r in rows if "error" in r),
        table="\n".join(map(_line, rows)),
        dates=" to ".join(sorted({min(r["date"] for r in rows), max(r["date"] for r in rows)})),
        packages=", ".join(dict.fromkeys(f"{r['library']} {r['version']}" for r in rows)),
        **{name: rows[0][name] for name in ("torch", "python", "hardware")},
        structures=len(tricky),
        wrong=sum("failure" in r for r in tricky),
        differ=len(differ),
        groups="\n".join(
            _group(name, tricky) for name in dict.fromkeys(r["group"] for r in tricky)
        ),
    )


def _line(row: Row) -> str:
    if "error" in row:
        return f"| {_name(row)} | {row['input']} | failed: {row['error']} |"
    cells = (
        _name(row),
        row["input"],
        f"{row['norms']}: {_kinds(row)}",
        _self_check(row),
        row["conversion_s"],
        f"{row['mib_before']} to {row['mib_after']}",
        f"{_ratio(row):.2f}x",
        row["bn_start_fp64"],
        row["fold_fp64"],
        f"{_yes(row['bn_trains_at_1'])}, {_yes(row['finite_at_1'])}",
    )
    return f"| {' | '.join(cells)} |"


def _self_check(row: Row) -> str:
    found = "verified" if row["verified"] == "True" else f"not verified: {row['unverified']}"
    return found if row["backed_out"] == "0" else f"{found}, {row['backed_out']} backed out"


def _group(name: str, tricky: Sequence[Row]) -> str:
    rows = [r for r in tricky if r["group"] == name]
    kinds = " / ".join(str(_sum(rows, kind)) for kind in ("fused", "replaced", "skipped"))
    wrong = sum("failure" in r for r in rows)
    differ = sum(r["without_example"] != "same" for r in rows)
    cells = (name.rstrip("."), len(rows), kinds, _sum(rows, "backed_out"), wrong, differ)
    return f"| {' | '.join(map(str, cells))} |"


def _name(row: Row) -> str:
    return f"{row['library']}: {row['model']}"


def _kinds(row: Row) -> str:
    return " / ".join(row[kind] for kind in ("fused", "replaced", "skipped"))


def _sum(rows: Sequence[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def _largest(rows: Sequence[Row], column: str) -> str:
    return max((row[column] for row in rows), key=float)


def _ratio(row: Row) -> float:
    return float(row["mib_after"]) / float(row["mib_before"])


def _yes(cell: str) -> str:
    return "yes" if cell == "True" else "no"
