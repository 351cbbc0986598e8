"""Exported files compute what the network does, for images of any size, and say how to use them."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepcontrol.cli import main
from deepcontrol.data.batches import normalised
from deepcontrol.predict.network import load_network
from tests.export.conftest import make_run

SEGNET, CLASSNET = (1, 3, 101, 75), (2, 3, 256, 256)  # neither traced nor checked by the command


def network_says(run: Path, images: Tensor) -> tuple[Tensor, ...]:
    model = load_network(run, "best", torch.device("cpu")).model
    with torch.no_grad():
        outputs = model(images)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def export(run: Path, *more: str) -> dict:
    """Its description."""
    assert main(["export", str(run), *more]) == 0
    (about,) = (run / "export").glob("*.json")
    return json.loads(about.read_text())


@pytest.mark.parametrize("norm", ["agc", "bn"])
@pytest.mark.parametrize(("model", "shape"), [("segnet", SEGNET), ("classnet", CLASSNET)])
def test_onnx(model: str, norm: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    run = make_run(tmp_path / "run", model, norm)
    about = export(run)  # by name alone, as a developer would use it
    session = onnxruntime.InferenceSession(run / "export" / about["file"])
    (given,) = session.get_inputs()
    assert [given.name, given.shape] == [about["input"]["name"], about["input"]["shape"]]
    pixels = torch.randint(256, (shape[0], *shape[2:], 3)).float()
    mean, std = (torch.tensor(about["input"][key]) for key in ("mean", "std"))
    images = ((pixels - mean) / std).permute(0, 3, 1, 2).contiguous()
    names = [output["name"] for output in about["outputs"]]
    found = [torch.from_numpy(a) for a in session.run(names, {given.name: images.numpy()})]
    expected = network_says(run, normalised(pixels))
    assert expected[0].std() > 0.01
    torch.testing.assert_close(found, list(expected), atol=2e-5, rtol=1e-4)
    assert found[0].shape[1] == len(about["classes"]) == len(about["colours"])
    assert about["folded"] is (norm == "agc")


@pytest.mark.parametrize("fold", ["--fold", "--no-fold"])
def test_exported(run: Path, fold: str) -> None:
    about = export(run, "--to", "exported", fold)
    program = torch.export.load(run / "export" / "segnet.pt2")
    assert "deepcontrol" not in program.graph_module.code
    for shape in (SEGNET, (2, 3, 64, 160)):
        images = torch.randn(shape)
        (expected,) = network_says(run, images)
        torch.testing.assert_close(program.module()(images), expected, atol=2e-5, rtol=1e-4)
    assert about["folded"] is (fold == "--fold")
    assert about["check"]["largest_difference_to_torch"] < 1e-4
    assert set(about["versions"]) == {"deepcontrol", "torch"}


def test_int8(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    out = run / "export" / "small.onnx"
    about = export(run, "--int8", "--fixed-means", "--out", str(out))
    rows = about["validation"]
    assert list(rows) == ["as trained", "fixed means", "fixed means, int8"]
    assert rows["as trained"]["relabelled"] == 0
    for name, row in rows.items():
        assert 0 < row["pixel_error"] <= 1
        assert 0 <= row["relabelled"] < 0.9, name
    table = capsys.readouterr().out
    assert f"{100 * rows['fixed means, int8']['pixel_error']:.2f}" in table
    graph = onnx.load(out).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 26
    assert all(made_by[name] == "DequantizeLinear" for n in convolutions for name in n.input)


def test_executorch(run: Path) -> None:
    pytest.importorskip("executorch")
    about = export(run, "--to", "executorch", "--size", "64x64")
    assert about["input"]["shape"] == [1, 3, 64, 64]
    assert (run / "export" / "segnet.pte").stat().st_size > 1000
