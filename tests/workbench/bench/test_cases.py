"""The selection of cases and their order."""

import pytest

from deepcontrol.workbench.bench import Bench, gpu_tasks
from deepcontrol.workbench.bench.cases import (
    CELLS,
    CONTENDERS,
    ENGINES,
    MAIN_CELLS,
    MAIN_CONTENDERS,
    MAIN_ENGINES,
    NETWORKS,
    cpu_comparisons,
    exists,
    network_cases,
    tier,
)
from deepcontrol.workbench.bench.kernels import op_cases


def test_default_grid_has_each_case_once() -> None:
    cases = network_cases(Bench())
    expected = 0
    for group, n in NETWORKS.items():
        contenders = sum(exists(group, contender) for contender in CONTENDERS)
        cells = len(n.batches) * len(n.dtypes) * len(n.sizes) * len(n.layouts)
        expected += cells * contenders * len(ENGINES)
    assert len(cases) == len(set(cases)) == expected
    assert {(c.group, c.batch, c.dtype) for c in cases} == set(CELLS)


def test_networks_have_the_norms_that_fit() -> None:
    pairs = {(c.group, c.contender) for c in network_cases(Bench())}
    assert {group for group, contender in pairs if contender == "bn-byte-pool"} == {"segnet"}
    assert {group for group, contender in pairs if contender == "frn"} == {"segnet", "resnet50"}
    assert {c for group, c in pairs if group == "nnunet-res"} == {"agc", "bn", "in", "none"}


def test_main_cases_come_first() -> None:
    cases = network_cases(Bench())
    head = cases[: len(MAIN_CONTENDERS) * len(MAIN_ENGINES)]
    assert [(c.engine, c.contender) for c in head] == [
        (engine, contender) for engine in MAIN_ENGINES for contender in MAIN_CONTENDERS
    ]
    assert {(c.group, c.batch, c.dtype) for c in head} == {("segnet", 8, "bf16")}
    second = cases[len(head)]
    assert (second.group, second.batch, second.contender) == ("segnet", 1, "agc")
    tiers = [tier(c) for c in cases]
    assert tiers == sorted(tiers)
    main = network_cases(Bench(main=True))
    assert main == cases[: len(main)]
    assert len(main) == len(MAIN_CELLS) * len(head)
    assert [task.cases[0] for task in gpu_tasks(Bench(main=True))] == main


def test_sizes_and_layouts_are_selected() -> None:
    settings = Bench(only=("nnunet",), sizes=("96x96x96",), layouts=("contiguous",), batches=(1,))
    cases = network_cases(settings)
    assert {(c.size, c.layout, c.batch) for c in cases} == {((96, 96, 96), "contiguous", 1)}
    both = network_cases(Bench(only=("nnunet-res",)))
    assert {(c.size[0], c.layout, c.batch) for c in both} == {
        (side, layout, batch)
        for side in (96, 128)
        for layout in ("channels_last", "contiguous")
        for batch in (1, 2)
    }
    with pytest.raises(ValueError, match="unknown --sizes 7x7: choose from"):
        Bench(sizes=("7x7",))


def test_small_groups_come_before_the_rest_of_the_grid() -> None:
    groups = [task.cases[0].group for task in gpu_tasks(Bench())]
    main = len(MAIN_CONTENDERS) * len(MAIN_ENGINES) * len(MAIN_CELLS)
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
    with pytest.raises(ValueError, match="need a GPU; leave them out"):
        cpu_comparisons(Bench(main=True))
    comparisons = cpu_comparisons(Bench())
    assert [(cases[0].group, cases[0].batch) for cases in comparisons] == [
        ("neuron", 1), ("inference", 1), ("segnet", 1), ("segnet", 4),
    ]  # fmt: skip


def test_invalid_settings() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        Bench(steps=4)
    with pytest.raises(ValueError, match="positive"):
        Bench(batches=(0,))
