"""Find a learning rate, with `find_lr` and with `deepcontrol train --find-lr`."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from deepcontrol.step import TrainingStep
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.train.find_lr import PICTURE, LRSearch, Trial, find_lr
from tests.workbench.train.runs import command


def regression(lr: float = 1.0) -> tuple[TrainingStep, list[tuple[Tensor, Tensor]]]:
    """A least-squares problem: the Hessian is 2 I, so SGD converges below lr 1."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    step = TrainingStep(model, nn.functional.mse_loss, optimizer)
    batches = []
    for _ in range(40):
        inputs, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
        inputs = 2 * inputs  # mean of 4 squares
        noise = 0.1 * torch.randn(4, 1, generator=generator)
        batches.append((inputs, inputs.sum(1, keepdim=True) + noise))
    return step, batches


def test_suggestion_is_below_the_divergence() -> None:
    step, batches = regression()
    search = find_lr(step, lambda: batches, [0.001 * 2**i for i in range(16)])
    assert search.suggestion is not None
    assert search.best is not None
    assert 0.03 < search.suggestion.lr <= search.best.lr < 1
    # It ends at the first learning rate that learns less than the lowest.
    assert [trial.lr for trial in search.trials] == [0.001 * 2**i for i in range(11)]
    losses = [trial.loss for trial in search.trials]
    assert losses[-1] > losses[0] > max(losses[1:-1])


def test_model_gets_its_weights_back() -> None:
    step, batches = regression()
    before = step.model.weight.clone()  # type: ignore[operator]
    first = find_lr(step, lambda: batches, [0.01, 0.1])
    assert torch.equal(step.model.weight, before)  # type: ignore[arg-type]
    assert find_lr(step, lambda: batches, [0.1, 0.01]) == first

    def interrupted() -> list[tuple[Tensor, Tensor]]:
        step(*batches[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_lr(step, interrupted, [0.1])
    assert torch.equal(step.model.weight, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_trials_do_not_depend_on_each_other(optimizer: type[torch.optim.Optimizer]) -> None:
    step, batches = regression()
    more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {"weight_decay": 0.1}
    step.optimizer = optimizer(step.model.parameters(), lr=1.0, **more)  # type: ignore[arg-type]
    together = find_lr(step, lambda: batches, [0.01, 0.1])
    assert len(together.trials) == 2
    assert find_lr(step, lambda: batches, [0.1]).trials == together.trials[1:]


def test_lowest_of_equally_good_learning_rates_is_suggested() -> None:
    # Images differ by 1, learning rates by less: only a comparison step by step can tell.
    images = [1.0, 2.0, 3.0, 1.5, 2.5] * 8
    noise = [0.01, -0.02, 0.015, -0.01] * 10
    curves = {
        0.01: [image + 0.1 + n for image, n in zip(images, noise, strict=True)],
        0.02: [image + 0.002 + n for image, n in zip(images, noise, strict=True)],
        0.04: images,
        0.08: [image + 0.05 - n for image, n in zip(images, noise, strict=True)],
        0.16: [*images[:-1], math.nan],
    }
    search = LRSearch(tuple(Trial(lr, tuple(losses)) for lr, losses in curves.items()))
    assert search.best is not None
    assert search.best.lr == 0.04
    assert search.suggestion is not None
    assert search.suggestion.lr == 0.02
    assert search.excess(search.trials[0]).mean == pytest.approx(0.1, abs=0.01)
    assert [search.excess(trial).is_significant for trial in search.trials[:4]] == [
        True,
        False,
        False,
        True,
    ]


def test_first_steps_do_not_count() -> None:
    slow, fast = Trial(0.1, (9.0, 9.0, 2.0, 2.0)), Trial(0.2, (1.0, 1.0, 3.0, 3.0))
    assert LRSearch((slow, fast)).best is slow


def test_invalid_arguments() -> None:
    step, batches = regression()
    for lrs in ([], [0.1, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="expected positive learning rates"):
            find_lr(step, lambda: batches, lrs)
    with pytest.raises(ValueError, match="no batches"):
        find_lr(step, list, [0.1])
    with pytest.raises(ValueError, match="all trials diverged"):
        LRSearch((Trial(1.0, (math.nan,)),)).excess(Trial(0.1, (1.0,)))


def test_command_prints_a_table_and_draws(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command(run), "--find-lr", "--find-lr-steps", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("trying up to 11 learning rates, 3 steps each\nlearning rate 0.00125  ")
    assert "Suggested: --lr" in first
    assert "last 2 of 3 steps" in first
    assert "0.00125" in first  # 1/32 of 0.02 x 2
    assert [path.name for path in run.iterdir()] == [PICTURE]
    with Image.open(run / PICTURE) as picture:
        assert picture.width > picture.height > 300
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_existing_run_is_not_changed(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def contents() -> dict[Path, bytes]:
        files = [path for path in whole.rglob("*") if path.is_file() and path.name != PICTURE]
        return {path: path.read_bytes() for path in files}

    before = contents()
    # The run's own flags are the defaults; another learning rate is no obstacle.
    assert (
        main(["train", "--out", str(whole), "--lr", "0.5", "--find-lr", "--find-lr-steps", "2"])
        == 0
    )
    assert "0.0156" in capsys.readouterr().out  # 0.5 / 32
    assert contents() == before
    (whole / PICTURE).unlink()


def test_command_without_any_good_learning_rate(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(run, lr=1e30), "--find-lr", "--find-lr-steps", "3"]) == 1
    assert "try again with a lower --lr" in capsys.readouterr().out
    assert (run / PICTURE).exists()


def test_command_needs_one_process(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(run), "--find-lr", "--find-lr-steps", "1"]) == 1
    assert "--find-lr-steps must be at least 2, got 1" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command(run), "--find-lr"]) == 1
    assert "needs a single process" in capsys.readouterr().err
    assert not run.exists()
