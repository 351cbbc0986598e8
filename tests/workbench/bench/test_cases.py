"""The selection of cases and their order."""

import pytest

from deepcontrol.workbench.bench import Bench
from deepcontrol.workbench.bench.cases import (
    CELLS,
    CONTENDERS,
    ENGINES,
    MAIN_CELLS,
    MAIN_PAIRS,
    NETWORKS,
    cpu_comparisons,
    network_cases,
    tier,
)
from deepcontrol.workbench.bench.kernels import op_cases
from deepcontrol.workbench.bench.run import gpu_tasks


def test_default_grid_has_each_case_once() -> None:
    cases = network_cases(Bench())
    cells = sum(len(n.batches) * len(n.dtypes) for n in NETWORKS.values())
    pooled = 6 * len(ENGINES)  # only SegNet's cells have BatchNorm with byte pooling
    assert len(cases) == cells * (len(CONTENDERS) - 1) * len(ENGINES) + pooled
    assert len(set(cases)) == len(cases)
    assert {(c.group, c.batch, c.dtype) for c in cases} == set(CELLS)


def test_main_cases_come_first() -> None:
    cases = network_cases(Bench())
    head = cases[: len(MAIN_PAIRS)]
    assert [(c.contender, c.engine) for c in head] == list(MAIN_PAIRS)
    assert {(c.group, c.batch, c.dtype) for c in head} == {("segnet", 8, "bf16")}
    second = cases[len(MAIN_PAIRS)]
    assert (second.group, second.batch, second.contender) == ("segnet", 1, "agc")
    tiers = [tier(c) for c in cases]
    assert tiers == sorted(tiers)
    assert {(c.contender, c.engine) for c in cases if tier(c) < 2} == set(MAIN_PAIRS)


def test_small_groups_come_before_the_rest_of_the_grid() -> None:
    groups = [task.cases[0].group for task in gpu_tasks(Bench())]
    main = len(MAIN_PAIRS) * len(MAIN_CELLS)
    small = ("profile", "max-batch", "ops")
    extras = sum(groups.count(name) for name in small)
    assert set(groups[main : main + extras]) == set(small)
    assert set(groups[main + extras :]) == set(NETWORKS)


def test_flags_select_cases() -> None:
    settings = Bench(
        only=("segnet",), contenders=("bn",), engines=("eager",), batches=(16,), dtypes=("fp32",)
    )
    (task,) = gpu_tasks(settings)
    case = task.cases[0]
    assert (case.contender, case.engine, case.batch, case.dtype) == ("bn", "eager", 16, "fp32")
    assert not op_cases(settings)
    assert {c.batch for c in op_cases(Bench())} == {1, 8}


def test_cpu_refuses_graphs_and_bf16() -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        cpu_comparisons(Bench(engines=("graph",)))
    with pytest.raises(ValueError, match="fp32 only"):
        cpu_comparisons(Bench(dtypes=("bf16",)))
    comparisons = cpu_comparisons(Bench())
    assert [(cases[0].group, cases[0].batch) for cases in comparisons] == [
        ("neuron", 1), ("inference", 1), ("segnet", 1), ("segnet", 4),
    ]  # fmt: skip


def test_invalid_settings() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        Bench(steps=4)
    with pytest.raises(ValueError, match="positive"):
        Bench(batches=(0,))
