"""The end of an epoch: what the model is worth now, written where others read it."""

import time
from typing import Any

import torch

from .. import runfolder
from ..data import Batch
from ..metrics import ConfusionMatrix
from .devices import peak_mib
from .evaluate import evaluate, evaluating
from .faults import NotFiniteError
from .progress import epoch_line
from .run import Run, images_in
from .samples import sample_sheet, save_png
from .trouble import evaluation_fault
from .windows import views


def close_epoch(run: Run) -> None:
    """Evaluate, write the epoch's lines and pictures, and step over to the next."""
    started = time.perf_counter()
    run.group.share_buffers_(run.model)
    run.show.begin("evaluating", len(run.val))
    done, loss_sum = 0, torch.zeros((), dtype=torch.float64, device=run.group.device)

    def after_each(batch: Batch, outputs: Any) -> None:
        nonlocal done
        images = images_in(run.val, done)
        loss = run.objective.loss(outputs, *run.targets(batch, images))
        loss_sum.add_(run.group.mean(loss).double() * images)
        done += 1
        run.show.advance(done)
        run.stop_if_asked()

    try:
        matrix = evaluate(run.model, run.val, run.step.autocast, after_each, run.config.window)
    except NotFiniteError:
        raise evaluation_fault(run) from None
    layers = look_at_layers(run)
    epoch = run.position.epoch + 1
    sheet = None
    if epoch in run.config.sample_epochs:
        sheet = sample_sheet(run.model, run.val, run.step.autocast, run.config.window)
    val_loss = float(loss_sum) / len(run.val.cache)
    metrics = metrics_of(run, epoch, val_loss, matrix, started)
    if run.group.leads:
        write(run, metrics, layers)
        if sheet is not None:
            save_png(sheet, run.config.out / "samples" / f"epoch-{epoch:04}.png")
    run.show.say(epoch_line(metrics, run.config.epochs))
    run.enter_next_epoch(matrix.pixel_error)
    run.closing_seconds = time.perf_counter() - started


def look_at_layers(run: Run) -> dict[str, Any]:
    """Each layer's statistics over the first validation batch, or over its first window."""
    images = views(next(iter(run.val.epoch())).images, run.config.window)[0]
    real = run.group.rank < min(run.val.batch_size, len(run.val.cache))
    with evaluating(run.model, run.group.device, run.step.autocast):
        return run.watch.look(images, run.group, real)


def metrics_of(
    run: Run, epoch: int, val_loss: float, matrix: ConfusionMatrix, started: float
) -> Any:
    """The epoch's line; only seconds, images_per_s and peak_mib depend on the clock."""
    position, trained = run.position, epoch > 0
    return {
        "epoch": epoch,
        "step": epoch * len(run.train),
        "train_loss": float(run.loss_sum) / position.images if trained else None,
        "val_loss": val_loss,
        "val_error": matrix.pixel_error,
        "val_mean_iou": matrix.mean_iou,
        "lr": run.config.rate,
        "seconds": position.seconds + time.perf_counter() - started,
        "images_per_s": position.images / position.seconds if trained else None,
        "peak_mib": peak_mib(run.group.device),
    }


def write(run: Run, metrics: dict[str, Any], layers: dict[str, Any]) -> None:
    """To the two files, and to TensorBoard."""
    epoch, folder = metrics["epoch"], run.config.out
    runfolder.append_record(folder / runfolder.LAYERS, {"epoch": epoch, "layers": layers})
    runfolder.append_record(folder / runfolder.METRICS, metrics)
    if run.events is None:
        return
    names = ("train_loss", "val_loss", "val_error", "val_mean_iou", "images_per_s")
    values = {name: metrics[name] for name in names if metrics[name] is not None}
    for layer, about in layers.items():
        for name, value in about.items():
            values[f"{name}/{layer}"] = value if name == "open" else value["mean"]
    run.events.write(values, epoch)
