"""Kernel kinds and the bytes of a pass; on a GPU, tiny measurements of ops and a profile."""

import pytest

from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.kernels import (
    MAP_OPS,
    WEIGHT_OPS,
    group_by_kind,
    map_bytes,
    measure_op,
    measure_profile,
)
from deepcontrol.workbench.models import SegNet


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
