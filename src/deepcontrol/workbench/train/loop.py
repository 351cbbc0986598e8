"""The training loop: steps, and after each epoch an evaluation, a line of metrics, a checkpoint."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from ..runfolder import RunInUseError, lock
from .config import Train
from .devices import choose_device, peak_mib, set_up
from .distributed import Group, joined
from .epoch import close_epoch
from .faults import is_out_of_memory, out_of_memory_at_start
from .interrupts import Stopped, interrupts
from .progress import Show, step_words
from .run import Run, images_in, open_run
from .saving import snapshot
from .trouble import memory_fault, raise_if_not_finite


def train(config: Train, console: Console) -> int:
    """Train, or go on training, until all epochs are done; returns the exit code."""
    set_up(config)
    with (
        joined(choose_device(config.device)) as group,
        interrupts() as noted,
        locked_by_first(config.out, group),
        Show(console, group.leads) as show,
    ):
        try:
            with open_run(config, group, show, noted) as run:
                return train_run(run)
        except Stopped as stopped:
            show.say(f"{stopped}: there was nothing to save yet.")
            return stopped.exit_code
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # A run that was opened has its own words for it.
            raise out_of_memory_at_start(group.device, config.size, config.width) from error


def train_run(run: Run) -> int:
    """Train what was opened, and deal with what can come in between."""
    try:
        train_epochs(run)
    except Stopped as stopped:
        if run.position.epoch < 0:
            raise
        save(run)
        run.saver.wait()
        run.show.say(f"{stopped}: saved at step {run.steps_done}. The same command goes on.")
        return stopped.exit_code
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return 0
    # Here the error is gone, and with it what its frames held of the memory.
    raise memory_fault(run)


def train_epochs(run: Run) -> None:
    """From wherever the run stands to the end of its last epoch."""
    position, epochs = run.position, run.config.epochs
    run.show.say(run.where())
    if position.epoch < 0:  # what it is like before any training
        close_epoch(run)
    while position.epoch < epochs:
        train_rest_of_epoch(run)
        close_epoch(run)
        if run.saves_after(position.epoch):
            save(run, is_best=position.best_epoch == position.epoch)
    run.saver.wait()
    run.show.say(f"all {epochs} epochs are done: {run.config.out}")


def train_rest_of_epoch(run: Run) -> None:
    """The steps that are left of the epoch at hand."""
    position, config = run.position, run.config
    epoch, steps = position.epoch + 1, len(run.train)
    run.show.begin(f"epoch {epoch}/{config.epochs}", steps)
    mark = time.perf_counter()
    for batch in run.train.epoch(epoch, start=position.step):
        images = images_in(run.train, position.step)
        loss = run.step(batch.images, *run.targets(batch, images))
        run.loss_sum += loss.double() * images
        position.step += 1
        position.images += images
        now = time.perf_counter()
        position.seconds, mark = position.seconds + now - mark, now
        if run.looks:
            value = run.gauge.read_after(loss)
            raise_if_not_finite(run, seen=value)
            rate, memory = position.images / position.seconds, peak_mib(run.group.device)
            words = step_words(value.loss, rate, memory, run.work_left(rate))
            run.show.advance(position.step, words)
            run.saver.check()
        if run.looks or run.group.world == 1:  # several processes have to ask at the same step
            run.stop_if_asked()
        if config.save_steps and position.step < steps and run.steps_done % config.save_steps == 0:
            save(run)
    raise_if_not_finite(run)  # which waits for a GPU to have done all of them
    position.seconds += time.perf_counter() - mark


def save(run: Run, is_best: bool = False) -> None:
    """Start to write a checkpoint of where the run stands."""
    raise_if_not_finite(run)
    run.position.loss_sum = float(run.loss_sum)
    checkpoint = snapshot(run.model, run.optimizer, run.position, run.group)
    if run.group.leads:
        run.saver.save(checkpoint, is_best)


@contextmanager
def locked_by_first(folder: Path, group: Group) -> Iterator[None]:
    """Hold the run folder; of several processes one does, and if it cannot, all say why."""
    with ExitStack() as stack:
        refusal = None
        if group.leads:
            try:
                stack.enter_context(lock(folder))
            except RunInUseError as error:
                refusal = str(error)
        refusal = group.gathered(refusal)[0]
        if refusal is not None:
            raise RunInUseError(refusal)
        yield
