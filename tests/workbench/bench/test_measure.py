"""Quantiles and the search for the largest batch; on a GPU, tiny measurements."""

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.workbench.bench import measure
from deepcontrol.workbench.bench.cases import ENGINES, Case
from deepcontrol.workbench.bench.measure import (
    MAX_BATCH,
    MIB,
    free_memory,
    measure_max_batch,
    measure_step,
    own_loop,
    percentiles,
    quantile,
    search_largest,
    training_step,
)


def test_quantiles() -> None:
    values = [float(v) for v in torch.randperm(101)]
    assert [quantile(values, p) for p in (0.0, 0.2, 0.5, 1.0)] == [0.0, 20.0, 50.0, 100.0]
    assert quantile([7.0], 0.8) == 7.0
    assert percentiles("ms", values) == {"ms_p20": "20.000", "ms_p50": "50.000", "ms_p80": "80.000"}


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 37, 64, MAX_BATCH])
def test_search_finds_the_largest(largest: int) -> None:
    tried = []
    assert search_largest(lambda n: tried.append(n) or n <= largest) == largest
    assert len(tried) == len(set(tried)) <= 24


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # from torch
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("contender", ["agc", "bn"])
def test_step_on_the_device(contender: str, engine: str) -> None:
    case = Case("segnet", contender, engine, 2, (64, 64), "bf16", 0.125)
    (found,) = measure_step(case, 5)
    assert 0 < float(found["ms_p20"]) <= float(found["ms_p50"]) <= float(found["ms_p80"])
    if engine != "reduce-overhead":
        assert 0 < float(found["activations_mib"]) <= float(found["peak_mib"])
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("group", ["nnunet", "nnunet-res"])
def test_nnunet_on_the_device(group: str, layout: str) -> None:
    for contender in ("agc", "in"):
        case = Case(group, contender, "graph", 1, (64, 64, 64), "bf16", 0.125, layout)
        (found,) = measure_step(case, 5)
        assert float(found["ms_p50"]) > 0
        assert found["layout"] == layout


def test_own_loop_trains_as_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("segnet", "agc", "graphed", 1, (32, 32), "fp32", 0.05)
    (step, batch), (peer, _) = (training_step(case, "cpu") for _ in range(2))
    assert step.engine == "eager"
    with pytest.raises(RuntimeError, match="not replayed: CUDA graphs need a CUDA device"):
        own_loop(case, step, batch)()  # at learning rate 0
    step.optimizer.state.clear()
    for each in (step, peer):
        each.optimizer.param_groups[0]["lr"] = 0.1
    seen = []

    class Fast:
        why_eager = None

        def __init__(self, model: nn.Module, inputs: Tensor, autocast: object) -> None:
            self.model = model

        def __call__(self, x: Tensor) -> Tensor:
            seen.append(x.shape)
            return self.model(x)

    monkeypatch.setattr(measure, "graphed", Fast)
    train = own_loop(case, step, batch)
    for _ in range(2):
        train()
        peer(*batch)
    assert seen == [batch[0].shape] * 2
    for p, q in zip(step.model.parameters(), peer.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.gpu
def test_step_frees_its_memory() -> None:
    case = Case("resnet50", "agc", "graph", 2, (64, 64), "bf16")  # has a layer that runs on cuBLAS
    free_memory()
    before = torch.cuda.memory_allocated()
    measure_step(case, 5)
    free_memory()
    assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.gpu
def test_agc_fits_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepcontrol.workbench.bench.measure.MEMORY_LIMIT_GIB", 1)
    largest = {}
    for contender in ("bn", "agc"):
        case = Case("max-batch", contender, "eager", 0, (128, 128), "bf16", 0.25)
        largest[contender] = int(measure_max_batch(case, 5)[0]["largest_batch"])
    assert largest["agc"] > largest["bn"] > 0
