"""Find a learning rate: short trainings from one start on the same batches.

The usual range test raises the learning rate in the course of one training. At batch size 1 its
curve is noise, because the losses of different images differ by more than those of different
learning rates (dev/LOG.md). Trainings on the same batches can be compared step by step, where this
noise cancels.
"""

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ...step import TrainingStep
from ..folders.storage import replacing
from ..optim import set_lr
from .build import add_noise_, build_model, move_, scale_to_images_
from .config import Train
from .data import build_data, open_sources
from .diagnosis import memory_fault_at_start
from .distributed import choose_autocast, choose_device, configure_torch, process_group
from .faults import is_out_of_memory
from .objective import build_objective
from .progress import Display
from .start import build_gems, build_optimizer

PICTURE = "find-lr.png"
# Learning rates to try, relative to --lr or its default: 1/32 to 32.
FACTORS = tuple(2.0**power for power in range(-5, 6))
STANDARD_ERRORS = 2  # larger differences count as significant


@dataclass(frozen=True)
class Trial:
    """A short training at one learning rate."""

    lr: float
    losses: tuple[float, ...]  # one per step

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))

    @property
    def second_half(self) -> tuple[float, ...]:
        """Losses of the second half, which are compared."""
        return self.losses[len(self.losses) // 2 :]

    @property
    def loss(self) -> float:
        """Mean loss of the second half; infinite if the training diverged."""
        return statistics.fmean(self.second_half) if self.is_finite else math.inf


@dataclass(frozen=True)
class Excess:
    """Mean difference to the best trial on the same batches, and its standard error."""

    mean: float
    error: float

    @property
    def is_significant(self) -> bool:
        return self.mean > STANDARD_ERRORS * self.error


@dataclass(frozen=True)
class LRSearch:
    """Trials at rising learning rates."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The trial with the lowest loss; None if all diverged."""
        finite = [trial for trial in self.trials if trial.is_finite]
        return min(finite, key=lambda trial: trial.loss, default=None)

    @property
    def suggestion(self) -> Trial | None:
        """The lowest learning rate that is not significantly worse than the best.

        In a few hundred steps several learning rates are often equally good. The lowest of them is
        the farthest from divergence, which may come later in a longer training.
        """
        return next((t for t in self.trials if t.is_finite and not self._is_worse(t)), None)

    def excess(self, trial: Trial) -> Excess:
        """Compare a trial that did not diverge with the best."""
        if self.best is None:
            raise ValueError("all trials diverged, so there is no best one to compare with")
        pairs = zip(trial.second_half, self.best.second_half, strict=True)
        differences = [a - b for a, b in pairs]
        error = 0.0
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
        return Excess(statistics.fmean(differences), error)

    def _is_worse(self, trial: Trial) -> bool:
        return self.excess(trial).is_significant


def find_lr(
    step: TrainingStep,
    batches: Callable[[], Iterable[Sequence[Tensor]]],
    lrs: Sequence[float],
    after_step: Callable[[], None] = lambda: None,
    after_trial: Callable[[Trial], None] = lambda trial: None,
) -> LRSearch:
    """Train from the same start at several learning rates, and compare the losses.

    Starts at the lowest learning rate and ends at the first one that diverges, or that learns less
    than the lowest. Afterwards the model has its former weights, and the optimizer no momentum.

    Args:
        step: Training step of the model.
        batches: Returns the batches (inputs, *targets) of a trial, the same ones at every call.
        lrs: Learning rates, in any order.
        after_step: Called after every step.
        after_trial: Called after every trial.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(8, 2)
    >>> inputs = torch.randn(20, 4, 8)
    >>> data = [(x, (x.sum(1) > 0).long()) for x in inputs]
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> step = TrainingStep(model, torch.nn.functional.cross_entropy, optimizer)
    >>> search = find_lr(step, lambda: data, [0.001, 0.01, 0.1, 1.0])
    >>> search.suggestion.lr
    1.0
    """
    if not lrs or not all(lr > 0 for lr in lrs):
        raise ValueError(f"expected positive learning rates, got {list(lrs)}")
    start = {name: value.clone() for name, value in step.model.state_dict().items()}
    trials: list[Trial] = []
    try:
        for lr in sorted(lrs):
            set_lr(step.optimizer, lr)
            losses = []
            for inputs, *targets in batches():
                losses.append(step(inputs, *targets).double())
                after_step()
            if not losses:
                raise ValueError("batches() returned no batches; expected at least one")
            trials.append(Trial(lr, tuple(torch.stack(losses).tolist())))
            after_trial(trials[-1])
            _restart(step, start)
            if trials[-1].loss > trials[0].loss or not trials[-1].is_finite:
                break
    finally:
        _restart(step, start)
    return LRSearch(tuple(trials))


def _restart(step: TrainingStep, start: dict[str, Tensor]) -> None:
    """Restore the weights and clear the optimizer's state, in place.

    A captured step needs the same tensors.
    """
    step.model.load_state_dict(start)
    for state in step.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


# deepcontrol train --find-lr


def run_find_lr(config: Train, steps: int, console: Console) -> int:
    """Try learning rates on the network and data of a run. Return the exit code.

    Prints a table and writes find-lr.png to the run folder. A run in this folder is not changed,
    and its checkpoints are not used.

    Args:
        config: Configuration of the run. The learning rates are around its own.
        steps: Steps at each learning rate.
        console: Console for table and progress.
    """
    if steps < 2:
        raise ValueError(f"--find-lr-steps must be at least 2, got {steps}")
    if config.fsdp or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--find-lr needs a single process: start it without torchrun and --fsdp")
    configure_torch(config)
    device = choose_device(config.device)
    try:
        search = _search(config, steps, device, console)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise memory_fault_at_start(device, config.sample_size, config.width) from error
    _print_search(search, steps, console)
    try:  # a training machine may lack matplotlib
        draw_search(search, config.out / PICTURE)
        line = str(config.out / PICTURE)
    except ImportError as error:
        line = f"no picture is drawn: {error}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if search.suggestion else 1


def _search(config: Train, steps: int, device: torch.device, console: Console) -> LRSearch:
    with process_group(device) as group, Display(console) as display:
        sources = open_sources(config)
        train = build_data(config, sources, group, display.decoding).train
        model = build_model(config, len(sources.train.classes))
        scale_to_images_(model, config, train)
        move_(model, device)
        add_noise_(model, config.noise, config.dropout, config.seed, group.rank)
        optimizer = build_optimizer(config, model, group)
        build_gems(config, model, optimizer)
        objective = build_objective(config, train.dataset, device)

        def before_update(loss: Tensor) -> Tensor:
            if config.clip_grad_norm is not None:
                clip_grad_norm_(model.parameters(), config.clip_grad_norm)
            return loss

        step = TrainingStep(
            model,
            objective.loss,
            optimizer,
            config.engine,
            choose_autocast(config.precision, device),
            before_update,
            config.accumulate,
        )

        def batches() -> Iterator[tuple[Tensor, ...]]:
            epochs = (train.epoch(epoch) for epoch in itertools.count(1))
            for batch in itertools.islice(itertools.chain.from_iterable(epochs), steps):
                targets, images = objective.targets(batch), len(batch.labels)
                parts = min(config.accumulate, images)
                if parts > 1:
                    ignored = objective.ignored_label
                    targets += (group.loss_scales(batch.labels, images, ignored, parts),)
                yield batch.images, *targets

        lrs = [config.learning_rate * factor for factor in FACTORS]
        done = itertools.count(1)
        display.start_bar("learning rates", steps * len(lrs))
        display.log(f"trying up to {len(lrs)} learning rates, {steps} steps each")

        def show(trial: Trial) -> None:
            loss = f"loss {trial.loss:.4f}" if trial.is_finite else "diverged"
            display.log(f"learning rate {trial.lr:.3g}  {loss}")

        return find_lr(step, batches, lrs, lambda: display.advance(next(done)), show)


def _print_search(search: LRSearch, steps: int, console: Console) -> None:
    best, suggestion = search.best, search.suggestion
    table = Table("learning rate", "loss", "above the lowest", "")
    for column in table.columns[:3]:
        column.justify = "right"
    for trial in search.trials:
        if not trial.is_finite:
            bad = next(i for i, loss in enumerate(trial.losses, 1) if not math.isfinite(loss))
            table.add_row(f"{trial.lr:.3g}", "", "", f"diverged at step {bad}")
            continue
        excess = search.excess(trial)
        above = "" if trial is best else f"{excess.mean:.4f} ± {excess.error:.4f}"
        marks = {"suggested": trial is suggestion, "lowest loss": trial is best}
        note = ", ".join(name for name, applies in marks.items() if applies)
        table.add_row(f"{trial.lr:.3g}", f"{trial.loss:.4f}", above, note)
    console.print(table)
    console.print(
        f"loss: mean over the last {steps - steps // 2} of {steps} steps; ±: standard error",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_advice(search), style="bold", highlight=False, soft_wrap=True)


def _advice(search: LRSearch) -> str:
    """Return the suggestion as a sentence, with advice if the range was too narrow."""
    best, suggestion = search.best, search.suggestion
    first, last = search.trials[0], search.trials[-1]
    if best is None or suggestion is None:
        return f"Training diverges at {first.lr:.3g} already: try again with a lower --lr."
    text = f"Suggested: --lr {suggestion.lr:.3g}"
    if suggestion is first:
        return f"{text}, the lowest that was tried. Try again with a lower --lr to look below."
    if best is last:
        return f"{text}. The loss still falls at {last.lr:.3g}: try again with --lr {last.lr:.3g}."
    return text


def draw_search(search: LRSearch, path: Path) -> None:
    """Draw the losses against the learning rate, and against the steps."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    finite = [trial for trial in search.trials if trial.is_finite]
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    against_lr, against_step = figure.subplots(1, 2)
    if finite:
        lrs, losses = [t.lr for t in finite], [t.loss for t in finite]
        errors = [STANDARD_ERRORS * search.excess(t).error for t in finite]
        against_lr.errorbar(lrs, losses, errors, fmt="o-", markersize=4, capsize=3)
    for trial in search.trials:
        if not trial.is_finite:
            against_lr.axvline(trial.lr, color="#c8321e", linewidth=1, label="diverged")
    if search.suggestion is not None:
        label = f"suggested: {search.suggestion.lr:.3g}"
        against_lr.axvline(search.suggestion.lr, color="0.5", linestyle=":", label=label)
        against_lr.legend(frameon=False)
    against_lr.set_xscale("log")
    against_lr.set_xlabel("learning rate")
    against_lr.set_ylabel("loss, second half of the steps")
    colors = matplotlib.colormaps["viridis"]
    for index, trial in enumerate(finite):
        color = colors(index / max(1, len(finite) - 1))
        smooth = _moving_average(trial.losses, max(1, len(trial.losses) // 10))
        against_step.plot(range(1, len(smooth) + 1), smooth, color=color, label=f"{trial.lr:.2g}")
    against_step.set_xlabel("step")
    against_step.set_ylabel("loss, moving average")
    if finite:
        against_step.legend(frameon=False, fontsize=7, title="learning rate", title_fontsize=7)
    with replacing(path, inside=path.parent) as file:
        figure.savefig(file, format="png", dpi=150)


def _moving_average(values: Sequence[float], width: int) -> list[float]:
    """Average each value with those before it, at most `width` in all."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
