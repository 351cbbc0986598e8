"""The best rate of each batch, from made-up curves."""

from deepcontrol.workbench.study.arms import agc, bn
from deepcontrol.workbench.study.grid import Cell, grid
from tests.workbench.study.made_up import curve


def test_the_lowest_of_each_batch_is_the_best() -> None:
    curves = {
        agc(8, 0.64): [curve(9.0), curve(diverged=3)],
        agc(8): [curve(9.5), curve(10.5)],
        agc(8, 0.08): [curve(12.0)],
        agc(1): [curve(10.0)],
        agc(8, 0.32, init="identity"): [curve(1.0)],  # not as the paper has it
        bn(8): [curve(1.0)],
        agc(4): [],
    }
    found = grid(curves)
    assert [(cell.batch, cell.rate, cell.is_best) for cell in found] == [
        (1, 0.02, False),  # there is nothing to compare it with
        (8, 0.08, False),
        (8, 0.16, True),
        (8, 0.64, False),
    ]
    assert found[2].error == "10.52 ± 0.71 (n=2)"
    assert found[3].error == "1 of 2 diverged"


def test_where_all_diverged_none_is_best() -> None:
    found = grid({agc(1): [curve(diverged=1)], agc(1, 0.16): [curve(diverged=1)]})
    assert found == [Cell(1, rate, "1 of 1 diverged", False) for rate in (0.02, 0.16)]


def test_one_rate_a_batch_is_no_grid() -> None:
    assert grid({agc(1): [curve()], agc(4): [curve()]}) == []
