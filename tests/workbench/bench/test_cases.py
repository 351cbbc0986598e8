"""Which cases there are, and that the telling ones come first."""

import pytest

from deepcontrol.workbench.bench import Bench
from deepcontrol.workbench.bench.cases import (
    CELLS,
    CONTENDERS,
    ENGINES,
    FIRST,
    MAIN,
    NETWORKS,
    network_cases,
    tier,
)
from deepcontrol.workbench.bench.cpu import cpu_sets
from deepcontrol.workbench.bench.ops import op_cases
from deepcontrol.workbench.bench.run import gpu_turns


def test_the_whole_grid_each_case_once() -> None:
    cases = network_cases(Bench())
    cells = sum(len(n.batches) * len(n.dtypes) for n in NETWORKS.values())
    pooled = 6 * len(ENGINES)  # SegNet's cells alone have BatchNorm with byte pooling
    assert len(cases) == cells * (len(CONTENDERS) - 1) * len(ENGINES) + pooled
    assert len(set(cases)) == len(cases)
    assert {(c.group, c.batch, c.dtype) for c in cases} == set(CELLS)


def test_the_telling_cases_come_first() -> None:
    cases = network_cases(Bench())
    head = cases[: len(FIRST)]
    assert [(c.contender, c.engine) for c in head] == list(FIRST)
    assert {(c.group, c.batch, c.dtype) for c in head} == {("segnet", 8, "bf16")}
    second = cases[len(FIRST)]
    assert (second.group, second.batch, second.contender) == ("segnet", 1, "agc")
    tiers = [tier(c) for c in cases]
    assert tiers == sorted(tiers)
    assert {(c.contender, c.engine) for c in cases if tier(c) < 2} == set(FIRST)


def test_quick_things_come_before_the_rest_of_the_grid() -> None:
    groups = [turn.cases[0].group for turn in gpu_turns(Bench())]
    main = len(FIRST) * MAIN
    extras = sum(groups.count(name) for name in ("shares", "fit", "ops"))
    assert set(groups[main : main + extras]) == {"shares", "fit", "ops"}
    assert set(groups[main + extras :]) == set(NETWORKS)


def test_flags_choose() -> None:
    asked = Bench(
        only=("segnet",), contenders=("bn",), engines=("eager",), batches=(16,), dtypes=("fp32",)
    )
    (turn,) = gpu_turns(asked)
    case = turn.cases[0]
    assert (case.contender, case.engine, case.batch, case.dtype) == ("bn", "eager", 16, "fp32")
    assert not op_cases(asked)
    assert {c.batch for c in op_cases(Bench())} == {1, 8}


def test_a_cpu_has_no_graphs_and_no_bf16() -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        cpu_sets(Bench(engines=("graph",)))
    with pytest.raises(ValueError, match="fp32 alone"):
        cpu_sets(Bench(dtypes=("bf16",)))
    sets = cpu_sets(Bench())
    assert [(s[0].group, s[0].batch) for s in sets] == [
        ("neuron", 1), ("inference", 1), ("segnet", 1), ("segnet", 4),
    ]  # fmt: skip


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        Bench(steps=4)
    with pytest.raises(ValueError, match="positive"):
        Bench(batches=(0,))
