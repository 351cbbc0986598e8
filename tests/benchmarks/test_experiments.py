"""The scripts in benchmarks/, with tiny networks on random images."""

import functools
import hashlib
import importlib
import math
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._dynamo.utils import counters

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.bench.results import Row, read_rows
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.folders.runfolder import METRICS
from deepcontrol.workbench.folders.storage import read_records
from deepcontrol.workbench.losses import class_weights, pixel_cross_entropy
from tests.noise import make_camvid, make_cifar

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = ("--size", "32x32", "--width", "0.05", "--epochs", "1")  # images are 32x64


@pytest.fixture(autouse=True)
def camvid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a tiny CamVid. Scripts run in a temporary folder and write their cache there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("allow_tf32", "benchmark"):  # scripts may set these
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    return make_camvid(tmp_path / "camvid")


def trained(norm: str, camvid: Path) -> Path:
    run = Path(norm)
    data = ["--data", "camvid", "--data-root", str(camvid), "--out", str(run)]
    words = ["train", *data, "--norm", norm, "--batch-size", "1", "--device", "cpu", *TINY]
    assert main(words) == 0
    return run


def rows_of(script: str, *words: object, patch: pytest.MonkeyPatch) -> list[Row]:
    """Run a script and read its CSV."""
    out = Path(f"{script}.csv")
    argv = [script, *map(str, words), "--device", "cpu", "--out", str(out)]
    patch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    return read_rows(out)


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_help_names_the_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"benchmarks/{script}.py" in " ".join(capsys.readouterr().out.split())


def test_crops_evaluates_windows_as_training_does(
    camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [trained(norm, camvid) for norm in ("agc", "bn")]
    rows = rows_of("crops", *runs, "--data-root", camvid, patch=monkeypatch)
    assert [(r["model"], r["norm"], r["split"]) for r in rows] == [
        ("segnet", norm, split) for norm in ("agc", "bn") for split in ("val", "train")
    ]
    for run, row in zip(runs, rows[::2], strict=True):
        assert row["error_by_windows"] == f"{read_records(run / METRICS)[-1]['val_error']:.4f}"
    assert rows[0]["error_whole"] != rows[0]["error_by_windows"]  # AGC's means differ
    assert rows[0]["error_by_windows"] != rows[1]["error_by_windows"]  # two networks


def test_finetuning_starts_from_the_checkpoint(
    camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained("agc", camvid)
    seen = rows_of("crops", run, "--data-root", camvid, patch=monkeypatch)[0]
    rows = rows_of(
        "finetune_whole_images", run, "--data-root", camvid, "--epochs", 0, patch=monkeypatch
    )
    for row in rows:  # every way, before its first epoch
        assert row["error_whole"] == seen["error_whole"]
        assert row["error_by_windows"] == seen["error_by_windows"]


def test_finetuning_uses_the_named_image_sizes(
    camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shapes, rates = trained("agc", camvid), [], set()
    call = TrainingStep.__call__

    def recorded(self: TrainingStep, *batch: Tensor) -> Tensor:
        shapes.append(tuple(batch[0].shape[2:]))
        rates.update(group["lr"] for group in self.optimizer.param_groups)
        return call(self, *batch)

    monkeypatch.setattr(TrainingStep, "__call__", recorded)
    rows = rows_of(
        "finetune_whole_images", run, "--data-root", camvid, "--epochs", 1, patch=monkeypatch
    )
    ways = [(row["finetuned_on"], row["finetune_epochs"]) for row in rows]
    more = ("crops", "whole images", "both")
    assert ways == [("none", "0"), *((way, "1") for way in more)]
    crop, whole = (32, 32), (32, 64)
    assert shapes == [crop, crop, whole, whole, crop, whole]
    assert rates == {0.02}  # the run's learning rate at batch 1
    assert len({(row["error_whole"], row["error_by_windows"]) for row in rows}) == 4


def test_lambda_has_its_own_learning_rate(
    camvid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data-root", camvid, *TINY, "--batch", 2, "--starts", 0.5, "--seeds", 0, 1)
    times = ("--lr", 0.04, "--times", 0, 100000)
    rows = rows_of("lambda_start", *words, *times, patch=monkeypatch)
    fixed, moved = ([r for r in rows if r["rate_times"] == t] for t in ("0.0", "100000.0"))
    assert len(fixed) == len(moved) == 2 * 25  # SegNet's neurons, for each seed
    assert {r[f"lambda_{k}"] for r in fixed for k in ("mean", "min", "max")} == {"0.5000"}
    means = {float(r["lambda_mean"]) for r in moved}
    assert max(abs(mean - 0.5) for mean in means) > 1e-3
    assert all(map(math.isfinite, means))
    assert "rate_times 0.0: lambda, half depth 0.50" in capsys.readouterr().out
    errors = {r["seed"]: r["val_error"] for r in fixed}
    assert errors["0"] != errors["1"]
    again = rows_of("lambda_start", *words, *times, patch=monkeypatch)
    assert again == rows  # finished trainings are skipped
    all_at_rest = ("--rate", 1e-20, "--times", 0)
    rested = rows_of("lambda_start", *words, *all_at_rest, patch=monkeypatch)[len(rows) :]
    assert {r["seed"]: r["val_error"] for r in rested} != errors  # the filters have been trained


def test_divergence_is_recorded_for_lambda(
    camvid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data-root", camvid, *TINY, "--epochs", 4, "--batch", 2)
    far = ("--rate", 1e30, "--starts", 1, "--times", 1)
    (row,) = rows_of("lambda_start", *words, *far, patch=monkeypatch)
    assert row["diverged_in_epoch"] in {"2", "3"}
    assert f"diverged in epoch {row['diverged_in_epoch']}" in capsys.readouterr().out


def test_treatments_have_their_effect(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--data-root", camvid, *TINY, "--epochs", 8, "--precision", "fp32", "--seeds", 0)
    words += ("--lr", 2)  # a high learning rate amplifies small differences
    max_norms, clip = [], torch.nn.utils.clip_grad_norm_

    def recorded(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        max_norms.append(max_norm)
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    rows = rows_of("highest_rate", *words, patch=monkeypatch)
    by_treatment = dict(zip((row["treatment"] for row in rows), max_norms[::8], strict=True))
    clipped = {name: norm for name, norm in by_treatment.items() if norm < math.inf}
    assert clipped == {
        "gradient of at most 1": 1.0,
        "gradient of at most 0.3": 0.3,
        "identity start, gradient of at most 1": 1.0,
        "unit start, gradient of at most 1": 1.0,
    }
    # All others end differently: no treatment is ignored or equal to another one.
    others = [row for row in rows if row["treatment"] not in clipped]
    ends = {(row["last_loss"], row["val_error"], row["median_gradient"]) for row in others}
    assert len(others) == len(ends) == 10
    again = rows_of("highest_rate", *words, patch=monkeypatch)
    assert again == rows  # finished trainings are skipped


def test_divergence_is_recorded_for_treatments(
    camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--data-root", camvid, *TINY, "--epochs", 4, "--precision", "fp32", "--seeds", 0)
    one = ("--treatments", "as the paper", "--rate", 1e30)
    (row,) = rows_of("highest_rate", *words, *one, patch=monkeypatch)
    assert row["diverged_at_step"] in {"2", "3"}
    assert "val_error" not in row


def test_loss_scale_equals_the_first_loss(camvid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["", "--data-root", str(camvid), "--size", "32x64", "--out", "loss.csv"]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPTS / "loss_scale.py"), run_name="__main__")
    ours, papers = read_rows(Path("loss.csv"))
    train = prepare(open_source("camvid", "train", camvid), (32, 64), Path("cache"))
    weights = class_weights(torch.from_numpy(train.histogram))
    labels = torch.from_numpy(np.array(train.labels))
    logits = torch.zeros(len(labels), len(weights), *labels.shape[1:])
    first = pixel_cross_entropy(logits, labels, weights)
    assert float(ours["first_loss"]) == pytest.approx(first.item(), abs=6e-4)
    scales = [float(row["mean_weight_of_a_pixel"]) for row in (ours, papers)]
    assert scales[0] != pytest.approx(scales[1], rel=0.05)
    there = float(papers["rate_0.64_in_terms_of_camvid"])
    assert there == pytest.approx(0.64 * scales[1] / scales[0], rel=0.01)


@pytest.mark.slow
def test_host_time_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("host_time", "--rounds", 2, patch=monkeypatch)
    names = ["conv+ReLU", "conv+BN+ReLU", "conv+GN+ReLU", "AGCConv2d", "conv+AGC2d+ReLU"]
    assert [row["contender"] for row in rows] == names
    for row in rows:
        assert float(row["forward_us_p20"]) <= float(row["forward_us_p50"])
        parts = (float(row[f"{part}_us_p20"]) for part in ("forward", "backward"))
        assert sum(parts) <= float(row["total_us_p20"]) + 0.1  # of two rounds
    assert {rows[1][f"total_vs_batchnorm_p{p}"] for p in (20, 50, 80)} == {"1.000"}


def test_kernel_shares_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--networks", "segnet:2", "--contenders", "agc", "bn")
    rows = rows_of("kernel_shares", *words, patch=monkeypatch)
    assert {row["contender"] for row in rows} == {"agc", "bn"}
    for contender, operator in (("agc", "FusedNeuron"), ("bn", "aten::native_batch_norm")):
        own = [row for row in rows if row["contender"] == contender]
        assert math.isclose(sum(float(row["share"]) for row in own), 1.0, abs_tol=0.01)
        times = [float(row["gpu_ms"]) for row in own]
        assert times == sorted(times, reverse=True)
        (found,) = (row for row in own if row["kernel"] == operator)
        assert float(found["calls"]) == 25  # 26 convolutions; the last one has no normalization
    more = rows_of("kernel_shares", *words[:-1], "--append", patch=monkeypatch)
    assert len(more) > len(rows)
    assert more[: len(rows)] == rows


def test_kernel_shares_refuse_unknown_networks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        rows_of("kernel_shares", "--networks", "resnet50", patch=monkeypatch)
    assert "expected NETWORK:BATCH such as resnet50:64" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # from torch
def test_compile_variants_run_what_they_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = counters["stats"]
    compiled.clear()
    compiler = functools.partial(torch.compile, backend="aot_eager")  # takes seconds, not minutes
    monkeypatch.setattr(torch, "compile", compiler)
    words = ("--networks", "unet3d:1", "--variants", "both", "--rounds", 2)
    rows = rows_of("compile_variants", *words, patch=monkeypatch)
    assert [row["variant"] for row in rows] == ["both", "bn"]
    assert rows[-1]["vs_bn_p50"] == "1.000"
    assert compiled["unique_graphs"] == 2  # none was compiled again while it was timed


@pytest.mark.slow
def test_map_sums_are_handed_over_in_converted_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--networks", "plain-unet", "residual-unet", "--batch", 1, "--size", 32, 32)
    rows = rows_of("map_sums", *words, "--rounds", 2, patch=monkeypatch)
    assert [row["network"] for row in rows] == ["plain-unet", "residual-unet"]
    assert rows[0]["hints"] == "7"  # the first of two convolutions at each resolution
    assert int(rows[1]["hints"]) > 0
    for row in rows:
        assert int(row["neurons"]) > int(row["hints"])
        assert float(row["on_ms_p20"]) <= float(row["on_ms_p80"])


def test_signal_grows_with_plain_gains_only(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--depths", 20, 8, "--batch", 2, "--picture", "signal.png")
    rows = rows_of("signal_depth", *words, patch=monkeypatch)
    last = {
        start: [
            float(row["variance"]) for row in rows if row["start"] == start and row["block"] == "9"
        ]
        for start in ("BatchNorm", "AGC, all gains 1", "AGC, last gains 1/sqrt(blocks)")
    }
    bn, plain, scaled = (values[0] for values in last.values())
    assert scaled < bn < plain
    assert [row["block"] for row in rows].count("logits") == 6
    assert all(row["torch"] == torch.__version__ for row in rows)
    rows_of("signal_depth", "--draw", "--picture", "again.png", patch=monkeypatch)
    with Image.open("signal.png") as drawn, Image.open("again.png") as again:
        assert drawn.tobytes() == again.tobytes()


def test_picture_of_the_signal_is_up_to_date() -> None:
    csv = SCRIPTS / "results" / "signal-depth.csv"
    with Image.open(SCRIPTS.parent / "docs" / "signal.png") as picture:
        shown = picture.info["csv-sha256"]
    assert shown == hashlib.sha256(csv.read_bytes()).hexdigest(), "run signal_depth.py --draw"


def test_treatments_of_residual_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar(tmp_path / "cifar", 64, 8)
    words = ("--data-root", "cifar", "--depth", 8, "--width", 0.25, "--epochs", 1, "--seeds", 0)
    words = (*words, "--batch-size", 4, "--lr", 0.01)
    rows = rows_of("residual", *words, patch=monkeypatch)
    assert len({row["treatment"] for row in rows}) == len(rows) == 40
    errors = {row["treatment"]: row["val_error"] for row in rows}
    assert all(0 <= float(error) <= 1 for error in errors.values())
    losses = {row["last_loss"] for row in rows}
    assert len(losses) > 24  # the treatments differ; rare clipping may not
    again = rows_of("residual", *words, patch=monkeypatch)  # all rows are there already
    assert again == rows
    (failed,) = rows_of(
        "residual", *words[:-1], 1e9, "--treatments", "agc", "--out", "high.csv", patch=monkeypatch
    )[-1:]
    assert failed["diverged_in_epoch"] == "1"


def test_finetuning_a_segmentation_network_with_batchnorm(
    camvid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ["--train-limit", "2", "--val-limit", "2"]
    assert main(["train", "--norm", "bn", "--batch-size", "1", "--device", "cpu", *TINY, *limits,
                 "--out", "run"]) == 0  # fmt: skip
    words = ("run", "--data-root", camvid, "--images", 2, "--epochs", 1, "--seeds", 0)
    words = (*words, "--batch-sizes", 1, "--lrs", 0.03, 0.02)
    rows = rows_of("finetune_bn", *words, patch=monkeypatch)
    before = {(row["contender"], row["domain"]): row["error_before"] for row in rows}
    assert len(before) == 12
    for domain in ("same", "shifted"):  # exact conversions
        assert before["agc", domain] == before["bn, frozen", domain] == before["bn", domain]
    assert len(rows) == 24
    assert all(row["error"] and row["images"] == "2" for row in rows)
    # A training does not depend on those before it, whose step it uses.
    Path("finetune_bn.csv").unlink()
    words = (*words[:-2], 0.02, "--contenders", "agc, centered", "--domains", "shifted")
    (alone,) = rows_of("finetune_bn", *words, patch=monkeypatch)
    assert alone in rows


def test_finetuning_a_classifier_with_batchnorm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cifar(tmp_path / "cifar", 300, 8)
    data = ["--data", "cifar10", "--data-root", "cifar", "--model", "resnet20", "--norm", "bn"]
    assert main(["train", *data, "--width", "0.25", "--epochs", "1", "--train-limit", "40",
                 "--batch-size", "4", "--device", "cpu", "--out", "run"]) == 0  # fmt: skip
    words = ("run", "--data-root", "cifar", "--per-class", 1, "--epochs", 1, "--seeds", 0)
    words = (*words, "--batch-sizes", 1, "--lrs", 1e-3)
    rows = rows_of("finetune_bn", *words, patch=monkeypatch)
    before = {(row["contender"], row["domain"]): row["error_before"] for row in rows}
    assert len(before) == 12
    for domain in ("same", "shifted"):  # exact conversions
        assert before["agc", domain] == before["bn, frozen", domain] == before["bn", domain]
    assert all(row["error"] for row in rows)


def test_backgrounds_are_timed_against_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--rounds", 2, "--contenders", "mean", "window 7x7", "median")
    rows = rows_of("background", *words, patch=monkeypatch)
    assert [(r["case"], r["background"]) for r in rows] == [
        (case, name)
        for case in ("neuron", "layer", "segnet")
        for name in ("mean", "window 7x7", "median")
    ]
    assert all(float(r["error"]) < 1e-6 for r in rows if r["case"] != "segnet")
    assert all(float(r["ms_p50"]) > 0 for r in rows)


def test_recurrent_norms_on_sequences_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--sequences", 8, "--scenes", 2, "--train-length", 2, "--lengths", 4, 5)
    words = (*words, "--batches", 4, "--seeds", 0)
    rows = rows_of("recurrent", *words, patch=monkeypatch)
    assert [r["norm"] for r in rows] == ["agc", "bn", "bn-per-step", "ln", "gn", "none"]
    assert all(0 <= float(r[f"error_{n}"]) <= 1 for r in rows for n in (4, 5))
    assert len({r["loss_5"] for r in rows}) == len(rows)
    assert rows_of("recurrent", *words, patch=monkeypatch) == rows  # all rows are there already


def test_one_call_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--rounds", 2, "--count", 2, "--layers", 0, 5, 7, "--limit", 600)
    rows = rows_of("one_call", *words, patch=monkeypatch)
    names = ["8->8 6x10 3x3", "3->16 6x10 3x3", "8->16 6x10 1x1 stride 2"]
    assert list(dict.fromkeys(row["layer"] for row in rows)) == names
    steps = [row for row in rows if row["part"] == "step"]
    forms = {"today", "one call, sign of y", "one call, bits by the next"}
    assert {row["form"] for row in steps} == forms
    assert sum(row["form"] == "one call, bits by the next" for row in steps) == 1  # y is an input
    for row in steps:
        assert float(row["error"]) < 5e-3
        assert float(row["gradient_error"]) < 0.1
        assert row["keeps_nan"] == "True"
    assert {row["form"] for row in rows if row["part"] == "folded"} == {
        "constant bias", "today", "one call"
    }  # fmt: skip


def test_one_call_is_compared_with_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a folded layer itself runs as one call, so calling it would compare nothing."""
    fold = importlib.import_module("deepcontrol.convert.fold")  # convert.fold is a function
    monkeypatch.setattr(fold, "folds_to_one_call", lambda *_: True)  # as on CUDA
    monkeypatch.setattr(fold, "conv_computed_bias_act", None)
    rows = rows_of("one_call", "--rounds", 2, "--count", 1, "--layers", 7, patch=monkeypatch)
    assert any(row["part"] == "folded" and row["form"] == "today" for row in rows)
