"""Exported files match the network for images of any size, and are described in JSON."""

import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data.batches import normalized
from deepcontrol.workbench.export import Export, run_export
from deepcontrol.workbench.predict import load_network
from deepcontrol.workbench.terminal import SafeConsole
from tests.workbench.export.conftest import make_run

# Shapes that the command neither traces nor checks.
SEGNET, CLASSNET = (1, 3, 101, 75), (2, 3, 256, 256)


def network_outputs(run: Path, images: Tensor) -> tuple[Tensor, ...]:
    model = load_network(run, "best", torch.device("cpu")).model
    with torch.no_grad():
        outputs = model(images)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def export(run: Path, *more: str) -> dict:
    """Export a run and return the description."""
    assert main(["export", str(run), *more]) == 0
    (about,) = (run / "export").glob("*.json")
    return json.loads(about.read_text())


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(
    ("model", "norm", "shape"),
    [
        ("segnet", "agc", SEGNET),
        pytest.param("segnet", "bn", SEGNET, marks=pytest.mark.slow),
        pytest.param("classnet", "agc", CLASSNET, marks=pytest.mark.slow),
        pytest.param("classnet", "bn", CLASSNET, marks=pytest.mark.slow),
    ],
)
def test_onnx(model: str, norm: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Use only the file and its description."""
    run = make_run(tmp_path / "run", model, norm)
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    about = export(run)
    session = onnxruntime.InferenceSession(run / "export" / about["file"])
    (given,) = session.get_inputs()
    assert [given.name, given.shape] == [about["input"]["name"], about["input"]["shape"]]
    pixels = torch.randint(256, (shape[0], *shape[2:], 3)).float()
    mean, std = (torch.tensor(about["input"][key]) for key in ("mean", "std"))
    images = ((pixels - mean) / std).permute(0, 3, 1, 2).contiguous()
    names = [output["name"] for output in about["outputs"]]
    found = [torch.from_numpy(a) for a in session.run(names, {given.name: images.numpy()})]
    expected = network_outputs(run, normalized(pixels))
    assert expected[0].std() > 0.01
    torch.testing.assert_close(found, list(expected), atol=1e-4, rtol=0)
    assert found[0].shape[1] == len(about["classes"]) == len(about["colors"])
    assert about["folded"] is (norm == "agc")


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("fold", ["--fold", "--no-fold"])
def test_exported(run: Path, fold: str) -> None:
    about = export(run, "--to", "exported", fold)
    program = torch.export.load(run / "export" / "segnet.pt2")
    assert "deepcontrol" not in program.graph_module.code
    for shape in (SEGNET, (2, 3, 64, 160)):
        images = torch.randn(shape)
        (expected,) = network_outputs(run, images)
        torch.testing.assert_close(program.module()(images), expected, atol=1e-4, rtol=0)
    assert about["folded"] is (fold == "--fold")
    assert about["check"]["largest_difference_to_torch"] < 1e-4
    assert set(about["versions"]) == {"deepcontrol", "torch"}


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
def test_classnet_exported(tmp_path: Path) -> None:
    """The outputs are a plain tuple, because readers do not have the class of the package."""
    run = make_run(tmp_path / "run", "classnet", "agc")
    export(run, "--to", "exported")
    program = torch.export.load(run / "export" / "classnet.pt2")
    found = program.module()(images := torch.randn(CLASSNET))
    assert type(found) is tuple
    torch.testing.assert_close(found, network_outputs(run, images), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
def test_accuracy_of_fixed_means(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = export(run, "--to", "exported", "--fixed-means")["validation"]
    assert list(rows) == ["as trained", "fixed means"]
    assert rows["as trained"]["relabeled"] == 0
    assert 0 < rows["fixed means"]["relabeled"] < 1
    assert f"{100 * rows['fixed means']['pixel_error']:.2f}" in capsys.readouterr().out
    program = torch.export.load(run / "export" / "segnet-fixed-means.pt2")
    assert not any(node.name.startswith("sum") for node in program.graph.nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
def test_int8(run: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    out = run / "export" / "small.onnx"
    rows = export(run, "--int8", "--out", str(out))["validation"]
    assert list(rows) == ["as trained", "int8"]
    assert 0 < rows["int8"]["relabeled"] < 0.5
    assert abs(rows["int8"]["pixel_error"] - rows["as trained"]["pixel_error"]) < 0.5
    graph = onnx.load(out).graph
    producer = {name: node.op_type for node in graph.node for name in node.output}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    inputs = [producer[node.input[0]] for node in convolutions]
    assert inputs.count("DequantizeLinear") == 6
    assert inputs.count("Div") == 5  # the means of all layers but the last, in fp32
    assert {producer[node.input[1]] for node in convolutions} == {"DequantizeLinear"}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(run / "runs.onnx")
    onnxruntime.InferenceSession(out, options)
    runs = [node.op_type for node in onnx.load(run / "runs.onnx").graph.node]
    assert runs.count("QLinearConv") == 6  # computed in integers, not in fp32 between casts


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
def test_executorch(run: Path) -> None:
    pytest.importorskip("executorch")
    about = export(run, "--to", "executorch", "--size", "64x64")
    assert about["input"]["shape"] == [1, 3, 64, 64]
    assert (run / "export" / "segnet.pte").stat().st_size > 1000


@pytest.mark.usefixtures("shallow")
def test_terminal_shows_the_parts_of_the_work(run: Path) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system=None, width=100)
    assert run_export(Export(run, "exported"), console) == 0
    for part in ("tracing the network", "writing segnet.pt2", "comparing segnet.pt2 with torch"):
        assert part in file.getvalue()
