"""Format the table of the zoo as a page of the documentation."""

from collections.abc import Sequence
from statistics import median

Row = dict[str, str]

_PAGE = """\
# AGC in models of other libraries

`python -m benchmarks.zoo --report` writes this page from `benchmarks/results/zoo.csv`; `make zoo`
repeats the measurement. For how to convert each library's models, see [plugins](plugins/index.md).

{models} untrained models were converted by `to_agc(model, example=image)`. Of {norms} BatchNorms,
{fused} were fused with their convolution into one neuron, {replaced} were replaced by an AGC layer
(the table that `to_agc` returns gives the reason), and {skipped} were skipped. Forward and backward
at batch 1 are finite in {finite} of {models} models. With BatchNorm, {refused} of them refuse
batch 1, because they have feature maps of one position. The bytes saved for backward fall to
{middle:.2f} of BatchNorm's (median; {lowest:.2f} to {highest:.2f}).

- **saved for backward**: bytes that autograd saves at batch 2 without the parameters
  (`deepcontrol.nn.saved_bytes`), with BatchNorm and after the conversion. Where BatchNorm comes
  before its convolution (resnetv2, DenseNet, SegResNet), it cannot be fused. LeViT's BatchNorms
  follow linear layers and see maps of one position. There AGC is an affine map, and its saved mean
  is as large as its input. Exclude such layers with `where`.
- **fold**: largest difference between `fold(model)` and the model in eval mode and fp32, divided
  by the largest output value. The model is `to_agc(init="bn")` of a model with the statistics of
  one batch; lambda is drawn from N(0.8, 0.2) for each filter. **rounding** is the difference
  between the unfolded model in fp32 and in fp64, on the same scale. **fold, He** is the same after
  `he_init_` and `to_agc(init="paper")`, where maps have no unit scale; {above} of {models}
  models are above 1e-5. In fp64, folding changes outputs by {fold_fp64} at most.
- **from BatchNorm**: difference between `to_agc(init="bn")` and BatchNorm in eval mode, on the same
  scale. Untrained deep networks with BatchNorm amplify rounding, so the difference between
  BatchNorm's own fp32 and fp64 follows in parentheses. In fp64 the two differ by {bn_start_fp64} at
  most.
- **batch 1**: whether a training step at batch 1 runs and is finite, with BatchNorm and with AGC.

| model | input | fused / replaced / skipped | saved for backward, MiB | | fold (rounding) \
| fold, He (rounding) | from BatchNorm (rounding) | batch 1: BN, AGC |
|---|---|---|---|---|---|---|---|---|
{table}

Measured {date} with {packages}; torch {torch}, Python {python}, {hardware}.
"""


def page(rows: Sequence[Row]) -> str:
    """Format the rows of the CSV as Markdown, with a summary."""
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
