"""The training loop: steps, then per epoch evaluation, records and a checkpoint."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..data import Batch
from ..folders import runfolder, storage
from ..folders.runfolder import RunLock
from ..hardware import crowded_note, fit_threads
from ..metrics import ConfusionMatrix, ImageError, ImageErrors
from .config import Train
from .data import Sources
from .diagnosis import (
    device_fault,
    evaluation_fault,
    memory_fault,
    memory_fault_at_start,
    raise_if_not_finite,
)
from .distributed import Group, choose_device, configure_torch, peak_mib, process_group
from .evaluate import evaluate, evaluating, split_windows
from .faults import NotFiniteError, is_device_failure, is_out_of_memory
from .objective import class_logits
from .progress import (
    Display,
    Pixels,
    epoch_line,
    one_class_line,
    sample_sheet,
    save_png,
    step_status,
    validation_note,
    worst_sheet,
)
from .run import Stopped, TrainingRun, images_in_batch, interrupts
from .snapshot import snapshot
from .start import claim_folder, open_run


def train(
    config: Train,
    console: Console,
    sources: Sources | None = None,
    model: nn.Module | None = None,
) -> int:
    """Train or resume a run until its last epoch. Return the exit code.

    Args:
        config: Settings of the run.
        console: Console for messages and progress.
        sources: The data. By default those that the settings name.
        model: The network, which is trained in place. By default that of the settings.

    Raises:
        ValueError, OSError, FaultError: The message explains the failure to the user.
    """
    configure_torch(config)
    fit_threads()
    with (
        process_group(choose_device(config.device)) as group,
        interrupts() as received,
        lock_by_main(config, group) as held,
        Display(console, group.is_main) as display,
    ):
        try:
            with open_run(config, group, display, received, held, sources, model) as run:
                return train_run(run)
        except Stopped as stopped:
            display.log(f"{stopped}: nothing to save yet.")
            return stopped.exit_code
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # train_run has its own message, so this happened in open_run.
            raise memory_fault_at_start(group.device, config.sample_size, config.width) from error


def train_run(run: TrainingRun) -> int:
    """Train an opened run; save after a signal; explain memory and device failures."""
    try:
        train_epochs(run)
    except Stopped as stopped:
        if run.position.epoch < 0:
            raise
        save(run)
        run.writer.wait()
        run.display.log(
            f"{stopped}: saved at step {run.steps_done}. Run the same command to resume."
        )
        return stopped.exit_code
    except (RuntimeError, MemoryError) as error:
        if is_device_failure(error):
            raise device_fault(run, error) from error
        if not is_out_of_memory(error):
            raise
    else:
        return 0
    # Outside the except block the traceback, and the tensors in its frames, are freed.
    raise memory_fault(run)


def train_epochs(run: TrainingRun) -> None:
    """Train from the run's position to the end of its last epoch."""
    position, epochs = run.position, run.config.epochs
    run.display.log(run.describe())
    for note in notes_at_start(run):
        run.display.log(note)
    if position.epoch < 0:  # epoch 0 is the network before training
        finish_epoch(run)
    seconds = 0.0
    while position.epoch < epochs:
        reason = run.reason_to_stop(seconds)
        if reason is not None:
            stop_early(run, reason)
            return
        started = time.perf_counter()
        train_epoch(run)
        finish_epoch(run)
        if run.saves_after(position.epoch):
            save(run, is_best=position.best_epoch == position.epoch)
        seconds = time.perf_counter() - started
    run.writer.wait()
    run.check_lock()
    run.display.log(f"finished {epochs} epoch{'s' * (epochs > 1)}: {run.config.out}")


def notes_at_start(run: TrainingRun) -> list[str]:
    """Return warnings about busy cores and about too few validation images."""
    notes = []
    if run.group.device.type == "cpu" and run.group.world_size == 1:
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        notes.append(crowded_note(threads, os.getloadavg()[0], cores))
    config, cache = run.config, run.val.dataset
    if config.data in ("folder", "coco", "nnunet", "imagefolder") and config.val_limit is None:
        advice = "set a larger --val-fraction, or make a split val/ of your own"
        counts = cache.histogram.tolist()
        notes.append(validation_note(counts, len(cache), cache.classes, advice))
    return [note for note in notes if note]


def stop_early(run: TrainingRun, reason: str) -> None:
    """Save the run before its last epoch, and say why it ends."""
    epoch = run.position.epoch
    if not run.saves_after(epoch):
        save(run)
    run.writer.wait()
    run.display.log(
        f"stopped after epoch {epoch} of {run.config.epochs}: {reason}. The best checkpoint is of "
        f"epoch {run.position.best_epoch}. Run the same command to continue: {run.config.out}"
    )


def train_epoch(run: TrainingRun) -> None:
    """Run the remaining steps of the current epoch."""
    position, config = run.position, run.config
    epoch, steps = position.epoch + 1, len(run.train)
    run.display.start_bar(f"epoch {epoch}/{config.epochs}", steps)
    mark = time.perf_counter()
    for batch in run.train.epoch(epoch, start=position.step):
        images = images_in_batch(run.train, position.step)
        run.set_lr()
        loss = run.step(batch.images, *run.targets(batch, images, config.accumulate))
        run.loss_sum += loss.double() * images
        position.step += 1
        position.images += images
        now = time.perf_counter()
        position.seconds, mark = position.seconds + now - mark, now
        if run.is_check_step:
            status = run.guard_reader.poll(loss)
            raise_if_not_finite(run, status)
            speed, memory = position.images / position.seconds, peak_mib(run.group.device)
            text = step_status(status.loss, speed, memory, run.images_left(speed))
            run.display.advance(position.step, text)
            run.writer.check()
        # Several processes must ask at the same step.
        if run.is_check_step or run.group.world_size == 1:
            run.stop_if_asked()
        if config.save_steps and position.step < steps and run.steps_done % config.save_steps == 0:
            save(run)
    raise_if_not_finite(run)  # waits until a GPU has finished all steps
    position.seconds += time.perf_counter() - mark


def finish_epoch(run: TrainingRun) -> None:
    """Evaluate, write the epoch's records and pictures, and go to the next epoch."""
    started = time.perf_counter()
    run.group.broadcast_buffers_(run.model)
    if run.average is not None:
        run.average.copy_buffers()
    try:
        matrix, val_loss, worst = _evaluate(run)
    except NotFiniteError:
        raise evaluation_fault(run) from None
    layers = _layer_stats(run)
    epoch = run.position.epoch + 1
    names = [run.sample_name(image.sample) for image in worst]
    sheets: dict[Path, Pixels] = {}
    if run.draws_after(epoch):
        drawn_with = run.step.autocast, run.config.window
        sheets[runfolder.sample_path(run.config.out, epoch)] = sample_sheet(
            run.evaluated, run.val, *drawn_with
        )
        if worst:
            sheets[runfolder.worst_path(run.config.out, epoch)] = worst_sheet(
                run.evaluated, run.val, worst, names, *drawn_with
            )
    metrics = _metrics(run, epoch, val_loss, matrix, started)
    if run.group.is_main:
        run.check_lock()
        errors = list(zip(names, (image.error for image in worst), strict=True))
        runfolder.write_validation(run.config.out, epoch, matrix.counts.tolist(), errors)
        _write_records(run, metrics, layers)
        for path, sheet in sheets.items():
            save_png(sheet, path)
    run.display.log(epoch_line(metrics, run.config.epochs))
    if epoch == run.config.epochs and matrix.only_class is not None:
        run.display.log(one_class_line(run.val.dataset.classes[matrix.only_class], run.config.task))
    run.advance_epoch(matrix.pixel_error, val_loss)
    run.eval_seconds = time.perf_counter() - started


def save(run: TrainingRun, is_best: bool = False) -> None:
    """Copy the run's state and start writing it as a checkpoint."""
    raise_if_not_finite(run)
    run.position.loss_sum = float(run.loss_sum)
    more = None if run.average is None else {"average": run.average.state()}
    checkpoint = snapshot(run.evaluated, run.optimizer, run.position, run.group, more)
    if run.group.is_main:
        run.check_lock()
        run.writer.save(checkpoint, is_best)


@contextmanager
def lock_by_main(config: Train, group: Group) -> Iterator[RunLock | None]:
    """Lock the run folder in the main process. If it fails, all processes raise."""
    with ExitStack() as stack:
        failure, held = None, None
        if group.is_main:
            try:
                held = stack.enter_context(claim_folder(config))
            except (OSError, ValueError) as error:
                failure = error
        failure = group.all_gather(failure)[0]
        if failure is not None:
            raise failure
        yield held


def _evaluate(run: TrainingRun) -> tuple[ConfusionMatrix, float, list[ImageError]]:
    """Return the validation images' confusion matrix, mean loss, and worst images."""
    run.display.start_bar("evaluating", len(run.val))
    errors = ImageErrors(run.val.ignored_label, run.val.rank, run.val.world)
    done, loss_sum = 0, torch.zeros((), dtype=torch.float64, device=run.group.device)

    def after_batch(batch: Batch, outputs: Any) -> None:
        nonlocal done
        images = images_in_batch(run.val, done)
        loss = run.objective.loss(outputs, *run.targets(batch, images))
        loss_sum.add_(run.group.mean(loss).double() * images)
        errors.update(done * run.val.batch_size, class_logits(outputs), batch.labels)
        done += 1
        run.display.advance(done)
        run.stop_if_asked()

    matrix = evaluate(run.evaluated, run.val, run.step.autocast, after_batch, run.config.window)
    of_processes = run.group.all_gather(errors.worst(runfolder.WORST_LISTED))
    worst = sorted((i for part in of_processes for i in part), key=lambda i: (-i.error, i.sample))
    return matrix, float(loss_sum) / len(run.val.dataset), worst[: runfolder.WORST_LISTED]


def _layer_stats(run: TrainingRun) -> dict[str, Any]:
    """Compute layer statistics on the first window of the first validation batch."""
    images = split_windows(next(iter(run.val.epoch())).images, run.config.window)[0]
    has_images = run.group.rank < min(run.val.batch_size, len(run.val.dataset))
    with evaluating(run.evaluated, run.group.device, run.step.autocast):
        return run.layer_stats.compute(images, run.group, has_images)


def _metrics(
    run: TrainingRun, epoch: int, val_loss: float, matrix: ConfusionMatrix, started: float
) -> dict[str, Any]:
    """Return the epoch's record.

    Only seconds, images_per_s and peak_mib vary between runs.
    """
    position, trained = run.position, epoch > 0
    scores: dict[str, Any] = {"val_error": matrix.pixel_error}
    if run.config.task == "segmentation":
        scores["val_mean_iou"] = matrix.mean_iou
        scores["val_class_iou"] = matrix.class_iou.tolist()
    else:
        scores["val_class_error"] = matrix.class_error.tolist()
    return {
        "epoch": epoch,
        "step": epoch * len(run.train),
        "train_loss": float(run.loss_sum) / position.images if trained else None,
        "val_loss": val_loss,
        **scores,
        "lr": run.lr_at(max(0, epoch * len(run.train) - 1)),
        "seconds": position.seconds + time.perf_counter() - started,
        "images_per_s": position.images / position.seconds if trained else None,
        "peak_mib": peak_mib(run.group.device),
    }


def _write_records(run: TrainingRun, metrics: dict[str, Any], layers: dict[str, Any]) -> None:
    """Append to layers.jsonl and metrics.jsonl, and write TensorBoard events."""
    epoch, folder = metrics["epoch"], run.config.out
    storage.append_record(folder / runfolder.LAYERS, {"epoch": epoch, "layers": layers})
    storage.append_record(folder / runfolder.METRICS, metrics)
    if run.events is None:
        return
    names = ("train_loss", "val_loss", "val_error", "val_mean_iou", "images_per_s")
    values = {name: metrics[name] for name in names if metrics.get(name) is not None}
    for name, iou in zip(run.val.dataset.classes, metrics.get("val_class_iou", ()), strict=False):
        if iou == iou:  # NaN if the class is neither labeled nor predicted
            values[f"val_class_iou/{name}"] = iou
    for layer, about in layers.items():
        for name, value in about.items():
            values[f"{name}/{layer}"] = value if name == "open" else value["mean"]
    run.events.write(values, epoch)
