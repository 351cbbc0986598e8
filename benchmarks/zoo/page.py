"""The table of the zoo as a page of the documentation."""

from collections.abc import Sequence
from statistics import median

Row = dict[str, str]

_PAGE = """\
# AGC in models of other libraries

Written by `python -m benchmarks.zoo --report` from `benchmarks/results/zoo.csv`; `make zoo`
measures it again. What one types for each library is in [plugins](plugins/index.md).

{models} models, untrained, converted by `to_agc(model, example=image)`. Of {norms} BatchNorms,
{fused} became one neuron with their convolution (fused), {replaced} a layer of their own
(replaced: the table that `to_agc` returns says why), {skipped} stayed (skipped). Forward and
backward at batch 1 are finite in {finite} of {models}; with BatchNorm, {refused} of them refuse
batch 1, because they have maps of one position. The bytes kept for the backward fall to
{middle:.2f} of BatchNorm's (median; {lowest:.2f} to {highest:.2f}).

- **kept for backward**: what autograd keeps at batch 2, parameters apart
  (`deepcontrol.nn.saved_bytes`), with BatchNorm and after the conversion. Where BatchNorm stands
  before its convolution (resnetv2, DenseNet, SegResNet) there is nothing to fuse. LeViT's
  BatchNorms stand behind linear layers and see one position a map: AGC is an affine map there,
  whose mean is as large as its input and is kept too. Leave such layers out with `where`.
- **fold**: the largest difference between `fold(model)` and the model in eval mode, in fp32,
  divided by the largest value of that output. The model is `to_agc(init="bn")` of one with a
  batch's statistics, with lambda drawn from N(0.8, 0.2) for each filter. **rounding** is how far
  the unfolded model in fp32 is from itself in fp64, on the same scale. **fold, He** is the same
  right after `to_agc(he_init_(model))`, where maps have no unit scale: of the {models} models
  {above} are above 1e-5. In fp64, folding makes a difference of {fold_fp64} at most.
- **from BatchNorm**: `to_agc(init="bn")` against BatchNorm in eval mode, on the same scale.
  Untrained deep networks with BatchNorm amplify rounding, so behind it is how far BatchNorm's own
  fp32 is from its fp64. In fp64 the two differ by {bn_start_fp64} at most.
- **batch 1**: whether a training step at batch 1 runs, with BatchNorm and with AGC, and is
  finite.

| model | input | fused / replaced / skipped | kept for backward, MiB | | fold (rounding) \
| fold, He (rounding) | from BatchNorm (rounding) | batch 1: BN, AGC |
|---|---|---|---|---|---|---|---|---|
{table}

Measured {date} with {packages}; torch {torch}, Python {python}, {hardware}.
"""


def page(rows: Sequence[Row]) -> str:
    """The rows of the CSV as Markdown, with a summary."""
    ratios = [_ratio(row) for row in rows]
    counts = {k: sum(int(r[k]) for r in rows) for k in ("fused", "replaced", "skipped")}
    packages = dict.fromkeys(f"{r['library']} {r['version']}" for r in rows)
    return _PAGE.format(
        models=len(rows),
        norms=sum(counts.values()),
        **counts,
        finite=sum(r["finite_at_1"] == "True" for r in rows),
        refused=sum(r["bn_trains_at_1"] == "False" for r in rows),
        middle=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        above=sum(float(r["he_fold"]) > 1e-5 for r in rows),
        fold_fp64=max(_largest(rows, "fold_fp64"), _largest(rows, "he_fold_fp64"), key=float),
        bn_start_fp64=_largest(rows, "bn_start_fp64"),
        table="\n".join(map(_line, rows)),
        packages=", ".join(packages),
        **{name: rows[0][name] for name in ("date", "torch", "python", "hardware")},
    )


def _line(row: Row) -> str:
    cells = (
        f"{row['library']}: {row['model']}",
        row["input"],
        f"{row['fused']} / {row['replaced']} / {row['skipped']}",
        f"{row['mib_before']} to {row['mib_after']}",
        f"{_ratio(row):.2f}x",
        f"{row['fold']} ({row['fp32_rounding']})",
        f"{row['he_fold']} ({row['he_fp32_rounding']})",
        f"{row['bn_start']} ({row['bn_rounding']})",
        f"{_yes(row['bn_trains_at_1'])}, {_yes(row['finite_at_1'])}",
    )
    return f"| {' | '.join(cells)} |"


def _largest(rows: Sequence[Row], column: str) -> str:
    return max((row[column] for row in rows), key=float)


def _ratio(row: Row) -> float:
    return float(row["mib_after"]) / float(row["mib_before"])


def _yes(cell: str) -> str:
    return "yes" if cell == "True" else "no"
