"""Quantiles, the search for the largest batch, kernel kinds; on a GPU, tiny measurements."""

import pytest
import torch

from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.measure import (
    MAX_BATCH,
    MIB,
    free_memory,
    measure_max_batch,
    measure_step,
    percentiles,
    quantile,
    search_largest,
)
from deepcontrol.workbench.bench.ops import MAP_OPS, WEIGHT_OPS, measure_op
from deepcontrol.workbench.bench.profile import group_by_kind, map_bytes, measure_profile
from deepcontrol.workbench.models import SegNet


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


def test_kernels_are_grouped_by_kind() -> None:
    times = {
        "agc_forward_kernel": 1.0,
        "agc_sum_kernel": 2.0,
        "_scale_backward": 0.1,
        "place_kernel": 0.2,
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>": 0.3,
        "sm90_xmma_fprop_implicit_gemm_bf16": 5.0,
        "void at::native::(anonymous namespace)::nll_loss2d_forward_kernel": 0.4,
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel": 0.5,
        "void at::native::vectorized_elementwise_kernel": 0.6,
        "Memset (Device)": 0.0,
    }
    sums = {kind: sum(names.values()) for kind, names in group_by_kind(times).items()}
    assert sums == {
        "AGC": 3.0,
        "gain in the weights": 0.1,
        "pooling": 0.2,
        "BatchNorm": 0.3,
        "loss": 0.4,
        "optimizer": 0.5,
        "convolutions": 5.0,
        "other": 0.6,
    }


def test_segnet_feature_maps_are_counted() -> None:
    """448 elements per pixel at full width: all maps except the logits, which have no AGC."""
    case = Case("profile", "agc", "graph", 8, (32, 64), "bf16")
    model = SegNet(19, width=0.125)
    assert map_bytes(model, case) == 448 // 8 * (32 * 64) * 8 * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # from torch
@pytest.mark.parametrize("engine", ["eager", "graph", "compile+graph"])
@pytest.mark.parametrize("contender", ["agc", "bn"])
def test_step_on_the_device(contender: str, engine: str) -> None:
    case = Case("segnet", contender, engine, 2, (64, 64), "bf16", 0.125)
    (found,) = measure_step(case, 5)
    assert 0 < float(found["ms_p20"]) <= float(found["ms_p50"]) <= float(found["ms_p80"])
    assert 0 < float(found["activations_mib"]) <= float(found["peak_mib"])


@pytest.mark.gpu
def test_step_frees_its_memory() -> None:
    case = Case("resnet50", "agc", "graph", 2, (64, 64), "bf16")  # has a layer that runs on cuBLAS
    free_memory()
    before = torch.cuda.memory_allocated()
    measure_step(case, 5)
    free_memory()
    assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MAP_OPS, *WEIGHT_OPS])
def test_op_on_the_device(name: str) -> None:
    size = (64, 32, 64) if name in MAP_OPS else (64, 64, 3, 3)
    (found,) = measure_op(Case("ops", name, "graph", 1, size, "bf16"), 5)
    assert float(found["us_p50"]) > 0
    assert float(found["floor_us"]) > 0


@pytest.mark.gpu
def test_profile_on_the_device() -> None:
    rows = measure_profile(Case("profile", "agc", "graph", 2, (64, 64), "bf16", 0.125), 5)
    parts = {found["part"]: float(found["gpu_ms"]) for found in rows}
    assert {"AGC", "gain in the weights", "pooling", "convolutions", "optimizer"} <= set(parts)


@pytest.mark.gpu
def test_agc_fits_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepcontrol.workbench.bench.measure.MEMORY_LIMIT_GIB", 1)
    largest = {}
    for contender in ("bn", "agc"):
        case = Case("max-batch", contender, "eager", 0, (128, 128), "bf16", 0.25)
        largest[contender] = int(measure_max_batch(case, 5)[0]["largest_batch"])
    assert largest["agc"] > largest["bn"] > 0
