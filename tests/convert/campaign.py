"""Convert small models with structures that mislead a converter, and tabulate the outcomes.

    python -m tests.convert.campaign

The models are those of tests/convert/tricky_*.py. Each is converted with an example and judged by
the tests of tests/convert/test_tricky.py: the outputs stay the same in both modes, every new layer
is called and trained, and no removed one is. Then it is converted without an example. Writes
benchmarks/results/tricky.csv and docs/zoo.md. Needs only torch; takes about half a minute.
"""

import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.page import PAGE, TABLE, TRICKY, page
from deepcontrol import to_agc
from deepcontrol.convert import Report
from deepcontrol.workbench.bench.results import read_rows, write_results
from tests.convert import test_tricky as tests
from tests.convert.tricky import CASES

Row = dict[str, object]
TOLERANCE = 1e-4  # of the outputs in fp32, as in the tests


def main() -> None:
    torch.set_num_threads(1)
    rows = [judge(name) for name in CASES]
    write_results(TRICKY, rows, "cpu")
    PAGE.write_text(page(read_rows(TABLE), read_rows(TRICKY)))
    print(f"Wrote {PAGE}")


def judge(name: str) -> Row:
    """Convert one model with and without an example; return its row."""
    torch.manual_seed(0)
    _, report = convert(tests.trained(CASES[name].make()), CASES[name].example)
    kinds = ("fused", "replaced", "skipped")
    return {
        "structure": name,
        "group": next(m.__doc__ for m in tests.MODULES if hasattr(m, name)),
        **{kind: report.count(kind) for kind in kinds},
        "backed_out": sum("backed out" in change.why for change in report),
        "failure": failure(name),
        "without_example": without_example(name),
    }


def convert(model: nn.Module, example: Any) -> tuple[nn.Module, Report]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests check them
        return to_agc(model, init="bn", example=example, report=True)


def failure(name: str) -> str:
    """Return why the conversion with an example is wrong; empty if it is right."""
    for check in (
        tests.test_start_from_batchnorm_keeps_the_function,
        tests.test_start_from_scratch_converts_the_same_layers,
    ):
        try:
            check(name)
        except Exception as error:  # a test fails with an assertion, a conversion with anything
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def without_example(name: str) -> str:
    """Convert without an example, and compare the outputs in both modes.

    Returns:
        "same", "differs", "raises", or "not reported" if the report does not say that the
        conversion was not verified.
    """
    case = CASES[name]
    torch.manual_seed(0)
    model = tests.trained(case.make())
    expected = tests.observe(model, case)
    _, report = convert(model.train(), None)
    if report.unverified is None:
        return "not reported"
    try:
        found = tests.observe(model, case)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    except Exception as error:
        return "differs" if isinstance(error, AssertionError) else "raises"
    return "same"


if __name__ == "__main__":
    main()
