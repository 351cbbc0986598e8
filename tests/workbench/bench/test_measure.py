"""The arithmetic of the figures, and on a GPU a tiny run of each kind of measurement."""

from pathlib import Path

import pytest
import torch

from deepcontrol.workbench.bench.cases import Case
from deepcontrol.workbench.bench.chart import draw
from deepcontrol.workbench.bench.fit import MOST, largest_that, measure_fit
from deepcontrol.workbench.bench.measure import (
    MIB,
    give_memory_back,
    measure_step,
    precision,
    quantile,
    spread,
)
from deepcontrol.workbench.bench.ops import OF_FILTERS, OF_MAPS, measure_op
from deepcontrol.workbench.bench.shares import by_kind, map_bytes, measure_shares
from deepcontrol.workbench.bench.table import step_table, tables
from deepcontrol.workbench.models import SegNet


def test_quantiles() -> None:
    values = [float(v) for v in torch.randperm(101)]
    assert [quantile(values, p) for p in (0.0, 0.2, 0.5, 1.0)] == [0.0, 20.0, 50.0, 100.0]
    assert quantile([7.0], 0.8) == 7.0
    assert spread("ms", values) == {"ms_p20": "20.000", "ms_p50": "50.000", "ms_p80": "80.000"}


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 37, 64, MOST])
def test_the_largest_is_found(largest: int) -> None:
    tried = []
    assert largest_that(lambda n: tried.append(n) or n <= largest) == largest
    assert len(tried) == len(set(tried)) <= 24


def test_kernels_by_kind() -> None:
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
    sums = {kind: sum(names.values()) for kind, names in by_kind(times).items()}
    assert sums == {
        "AGC": 3.0,
        "gain in the weights": 0.1,
        "pooling": 0.2,
        "BatchNorm": 0.3,
        "loss": 0.4,
        "optimiser": 0.5,
        "convolutions": 5.0,
        "other": 0.6,
    }


def test_segnets_maps_are_counted() -> None:
    """448 elements a pixel at full width: all maps but the logits, which have no AGC."""
    case = Case("shares", "agc", "graph", 8, (32, 64), "bf16")
    model = SegNet(19, width=0.125)
    assert map_bytes(model, case) == 448 // 8 * (32 * 64) * 8 * 2


def test_precision_is_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    with precision("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before


def row(contender: str, engine: str, ms: float, **more: str) -> dict[str, str]:
    case = Case("segnet", contender, engine, 8, (256, 512), "bf16")
    return {**case.key, **spread("ms", [ms]), "activations_mib": "10.0", "run": "a", **more}


def test_ratios_are_to_batchnorm_and_its_fastest_engine() -> None:
    rows = [
        row("agc", "graph", 6.0),
        row("bn", "eager", 12.0),
        row("bn", "compile+graph", 8.0, run="b"),
    ]
    table = step_table(rows)
    cells = [list(column.cells) for column in table.columns]
    assert cells[4] == ["0.500", "1.000", "~0.667"]
    assert cells[5] == ["~0.750", "~1.500", "1.000"]


def test_a_chart_is_drawn_of_what_was_timed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "chart.png"
    failed = {**Case("segnet", "gn", "eager", 8, (256, 512), "bf16").key, "error": "no memory"}
    assert not draw([failed], path)
    assert draw([row("agc", "graph", 6.0), row("bn", "eager", 12.0), failed], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(list(tables([row("agc", "graph", 6.0), failed]))) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("engine", ["eager", "graph", "compile+graph"])
@pytest.mark.parametrize("contender", ["agc", "bn"])
def test_a_step_on_the_device(contender: str, engine: str) -> None:
    case = Case("segnet", contender, engine, 2, (64, 64), "bf16", 0.125)
    (found,) = measure_step(case, 5)
    assert 0 < float(found["ms_p20"]) <= float(found["ms_p50"]) <= float(found["ms_p80"])
    assert 0 < float(found["activations_mib"]) <= float(found["peak_mib"])


@pytest.mark.gpu
def test_nothing_of_a_step_is_left_on_the_device() -> None:
    case = Case("resnet50", "agc", "graph", 2, (64, 64), "bf16")  # cuBLAS has a layer in it
    give_memory_back()
    before = torch.cuda.memory_allocated()
    measure_step(case, 5)
    give_memory_back()
    assert torch.cuda.memory_allocated() - before < MIB


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OF_MAPS, *OF_FILTERS])
def test_an_op_on_the_device(name: str) -> None:
    size = (64, 32, 64) if name in OF_MAPS else (64, 64, 3, 3)
    (found,) = measure_op(Case("ops", name, "graph", 1, size, "bf16"), 5)
    assert float(found["us_p50"]) > 0
    assert float(found["floor_us"]) > 0


@pytest.mark.gpu
def test_shares_on_the_device() -> None:
    rows = measure_shares(Case("shares", "agc", "graph", 2, (64, 64), "bf16", 0.125), 5)
    parts = {found["part"]: float(found["gpu_ms"]) for found in rows}
    assert {"AGC", "gain in the weights", "pooling", "convolutions", "optimiser"} <= set(parts)


@pytest.mark.gpu
def test_agc_fits_a_larger_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepcontrol.workbench.bench.fit.LIMIT_GIB", 1)
    largest = {}
    for contender in ("bn", "agc"):
        case = Case("fit", contender, "eager", 0, (128, 128), "bf16", 0.25)
        largest[contender] = int(measure_fit(case, 5)[0]["largest_batch"])
    assert largest["agc"] > largest["bn"] > 0
