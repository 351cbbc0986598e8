"""Train several classifiers of one shape at once, as one vectorized network.

At batch 1 a GPU spends a step on launching hundreds of kernels, whatever they compute. Networks
that differ only in seed and learning rate share these launches: their parameters are stacked, and
`torch.func.vmap` turns each op into one op for all of them (a convolution into a grouped one).

Each network has its own initialization, images, learning rate, gradient norm and BatchNorm
statistics, as in a run of its own. One that diverges does not change the others. After each epoch
its weights are copied to the model of its run, which is evaluated and recorded as in `train`.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ...step import WARMUP_STEPS, paused_garbage_collection
from ..folders import runfolder
from ..folders.runfolder import RunLock
from .config import ADDED_LATER, Train, flag_name
from .diagnosis import raise_if_not_finite
from .distributed import Group, choose_device, configure_torch, is_distributed, peak_mib
from .faults import FaultError, GuardStatus, is_out_of_memory
from .loop import finish_epoch
from .progress import Display, step_status
from .run import Interrupts, Stopped, TrainingRun, interrupts
from .start import claim_folder, is_finished, load_started_config, open_run

UNSUPPORTED = (
    "optimizer", "loss", "accumulate", "ema", "patience", "minutes", "background", "noise",
    "dropout", "gems", "lambda_lr",
)  # fmt: skip
VARIED = ("seed", "lr", "out")  # settings in which the networks may differ
CHECK_EVERY = 256  # steps between two reads of the loss, for which Python waits for a GPU


def train_ensemble(configs: Sequence[Train], console: Console) -> int:
    """Train several classification runs at once, each in its own run folder.

    The folders get the files of `train` except checkpoints. An interrupted ensemble therefore
    starts again from the first epoch. A run that diverges gets its diverged.json; the others
    continue.

    Args:
        configs: The runs, equal except for seed, lr and out.
        console: Rich console. Lines of a run start with the name of its folder.

    Returns:
        The exit code: 0 if every run was trained to its end or diverged; 1 if the outputs of an
        untrained network were not finite; 130 or 143 after a signal.

    Raises:
        ValueError, OSError, FaultError: The message explains the failure to the user.
    """
    check_configs(configs)
    device = choose_device(configs[0].device)
    with interrupts() as received, Display(console) as display:
        try:
            with open_runs(configs, Group(device), console, received) as runs:
                return _train_runs(runs, display, received)
        except Stopped as stopped:
            display.log(f"{stopped}: stopped. The same ensemble starts again from epoch 1.")
            return stopped.exit_code
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise FaultError(
                f"out of memory on {device} with {len(configs)} networks at batch size "
                f"{configs[0].batch_size} (peak {peak_mib(device):,.0f} MiB): train fewer at once"
            ) from error


def check_configs(configs: Sequence[Train]) -> None:
    """Raise ValueError unless the runs can be trained as one ensemble."""
    if not configs:
        raise ValueError("an ensemble needs at least one run, got none")
    first = configs[0]
    if first.task != "classification":
        raise ValueError(f"ensembles are for classification, but --model is {first.model}")
    if first.fsdp or is_distributed():
        raise ValueError("an ensemble trains in a single process: omit --fsdp and torchrun")
    for name in UNSUPPORTED:
        if getattr(first, name) != ADDED_LATER[name]:
            raise ValueError(
                f"--{flag_name(name)} {getattr(first, name)} is not supported in an ensemble: "
                "train the runs one by one"
            )
    for field in fields(Train):
        values = {getattr(config, field.name) for config in configs}
        if len(values) > 1 and field.name not in VARIED:
            found = ", ".join(sorted(map(str, values)))
            raise ValueError(
                f"the runs of an ensemble may differ in seed, lr and out only, but "
                f"--{field.name.replace('_', '-')} is {found}"
            )
    folders = [config.out.resolve() for config in configs]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise ValueError(f"each run needs its own --out, but several have {', '.join(twice)}")


@contextmanager
def open_runs(
    configs: Sequence[Train], group: Group, console: Console, received: Interrupts
) -> Iterator[list[TrainingRun]]:
    """Lock the folders and open the runs. Nothing is written if a folder is refused."""
    with ExitStack() as stack:
        held: list[RunLock] = []
        for config in configs:
            held.append(stack.enter_context(claim_folder(config)))
        for config in configs:
            check_startable(config)
        runs: list[TrainingRun] = []
        for config, lock in zip(configs, held, strict=True):
            configure_torch(config)
            display = Display(console, prefix=f"{config.out.name}: ")
            run = stack.enter_context(open_run(config, group, display, received, lock))
            if runs:  # a single copy of the images on the device
                run.val = runs[0].val
            same_seed = (other.train for other in runs if other.config.seed == config.seed)
            run.train = next(same_seed, run.train)
            runs.append(run)
        yield runs


def check_startable(config: Train) -> None:
    """Raise ValueError if the folder has a finished run, or one that can be resumed."""
    before, _ = load_started_config(config)
    if before is not None and is_finished(config.out, before.epochs):
        raise ValueError(f"{config.out} has a finished run; leave it out or choose another --out")
    for name in (runfolder.LAST, runfolder.PREVIOUS):
        if (config.out / name).exists():
            raise ValueError(
                f"{config.out} has a checkpoint, and an ensemble cannot resume it: continue it "
                "with `deepcontrol train`, or choose another --out"
            )


# The loop


def _train_runs(runs: Sequence[TrainingRun], display: Display, received: Interrupts) -> int:
    """Train all runs to their last epoch. Return the exit code."""
    config, code = runs[0].config, 0
    networks = VectorizedNetworks(runs)
    display.log(f"{len(runs)} networks at once; the first: {runs[0].describe()}")
    alive = dict(enumerate(runs))
    for epoch in range(config.epochs + 1):
        seconds = 0.0
        if epoch > 0:  # epoch 0 is the networks before training
            seconds = _train_epoch(networks, epoch, display, received)
        for index, run in list(alive.items()):
            run.model.load_state_dict(networks.state(index))
            run.loss_sum.copy_(networks.loss_sum[index])
            run.position.seconds = seconds
            run.position.images = len(run.train.dataset) if epoch else 0
            try:
                if networks.bad[index]:
                    steps = int(networks.good_steps[index])
                    raise_if_not_finite(run, GuardStatus(float("nan"), True, steps))
                finish_epoch(run)
            except FaultError as fault:
                run.display.log(str(fault))
                code = code if epoch else 1
                del alive[index]
        if not alive:
            break
    display.log(f"finished {len(alive)} of {len(runs)} networks")
    return code


def _train_epoch(
    networks: "VectorizedNetworks", epoch: int, display: Display, received: Interrupts
) -> float:
    """Run the steps of an epoch. Return the seconds that they took."""
    config, streams = networks.config, networks.streams
    steps = len(streams[0])
    started, images = time.perf_counter(), 0
    networks.start_epoch(epoch)
    display.start_bar(f"epoch {epoch}/{config.epochs}", steps)
    epochs = (stream.epoch(epoch) for stream in streams)
    for step, batches in enumerate(zip(*epochs, strict=True), start=1):
        networks.step(
            torch.stack([batch.images for batch in batches]),
            torch.stack([batch.labels for batch in batches]),
        )
        received.raise_if_any()
        images += len(batches[0].labels)
        if step % CHECK_EVERY == 0 or step == steps:
            loss_sums, bad = networks.loss_sum.tolist(), networks.bad.tolist()
            if all(bad):
                break
            finite = [loss for loss, is_bad in zip(loss_sums, bad, strict=True) if not is_bad]
            speed = images / (time.perf_counter() - started)
            left = (config.epochs - epoch + 1) * len(streams[0].dataset) - images
            loss = sum(finite) / len(finite) / images
            display.advance(step, step_status(loss, speed, peak_mib(networks.device), left))
    return time.perf_counter() - started


class VectorizedNetworks:
    """The networks of several runs as one, and their SGD.

    All trained parameters are one tensor `weights` (networks, parameters), so that an update is a
    few ops, whatever the number of layers. The update is that of torch.optim.SGD:

        momentum = mu * momentum + gradient + weight_decay * weights
        weights = weights - lr * momentum

    From the first step on in which its loss or gradient is not finite, a network keeps its weights.

    Args:
        runs: The runs. Their models give the initial weights.

    Attributes:
        streams: Training batches by seed. Networks with the same seed share a stream.
        loss_sum: Sum of the loss over the images of the epoch, by network.
        bad: Whether a step of the network was not finite.
        good_steps: Steps before the first one that was not finite.
        captured: The CUDA graph of a step, its images and its labels; None before the capture.
    """

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        first = runs[0]
        self.config, self.device, self.runs = first.config, first.group.device, runs
        self.autocast, self._objective = first.step.autocast, first.objective
        by_seed = {run.config.seed: run.train for run in runs}
        self.streams = list(by_seed.values())
        seeds = list(by_seed)
        self._stream_of = self._tensor([seeds.index(run.config.seed) for run in runs])

        decays = {
            p: group["weight_decay"] for group in first.optimizer.param_groups
            for p in group["params"]
        }  # fmt: skip
        parameters = dict(first.model.named_parameters())
        trained = [name for name, p in parameters.items() if p.requires_grad]
        self._shapes = {name: parameters[name].shape for name in trained}
        self._sizes = [parameters[name].numel() for name in trained]
        states = [
            {**dict(r.model.named_parameters()), **dict(r.model.named_buffers())} for r in runs
        ]
        with torch.no_grad():
            self.weights = torch.stack(
                [torch.cat([state[name].reshape(-1) for name in trained]) for state in states]
            )
            # Frozen parameters and buffers
            self._others = {
                name: torch.stack([state[name] for state in states])
                for name in states[0]
                if name not in self._shapes
            }
        self.weights.requires_grad_()
        self._weight_decay = torch.cat(
            [torch.full((parameters[n].numel(),), decays[parameters[n]]) for n in trained]
        ).to(self.device)
        self._momentum = torch.zeros_like(self.weights)
        self._template = _template(first.model, self.autocast)
        self._full_batch_losses: Callable[..., Tensor] = self._losses
        if self.config.engine.startswith("compile"):
            self._full_batch_losses = torch.compile(self._losses, fullgraph=True, dynamic=False)

        count = len(runs)
        self.loss_sum = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.bad = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.good_steps = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._lr = torch.zeros(len(first.train), count, device=self.device)  # by step of the epoch
        self._step = self._tensor([0])  # step of the epoch
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None
        self._warmup_steps = 0

    def start_epoch(self, epoch: int) -> None:
        """Set the learning rates of an epoch's steps, and reset the sum of the loss."""
        steps = range((epoch - 1) * len(self._lr), epoch * len(self._lr))
        by_lr = {run.config.learning_rate: run for run in self.runs}
        columns = {lr: torch.tensor([run.lr_at(s) for s in steps]) for lr, run in by_lr.items()}
        self._lr.copy_(torch.stack([columns[run.config.learning_rate] for run in self.runs], 1))
        self._step.zero_()
        self.loss_sum.zero_()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train all networks on one batch each; the engine is that of `TrainingStep`.

        Args:
            images: (streams, N, C, H, W).
            labels: (streams, N).
        """
        if labels.shape[1] < self.config.batch_size:  # the last batch: not worth a compilation
            self._eager_step(self._losses, images, labels)
        elif self.device.type != "cuda" or not self.config.engine.endswith("graph"):
            self._eager_step(self._full_batch_losses, images, labels)
        elif self._warmup_steps < WARMUP_STEPS:
            self._warmup_steps += 1
            self._eager_step(self._full_batch_losses, images, labels)
        else:
            if self.captured is None:
                self.captured = self._capture(images, labels)
            graph, static_images, static_labels = self.captured
            static_images.copy_(images)
            static_labels.copy_(labels)
            graph.replay()

    def state(self, index: int) -> dict[str, Tensor]:
        """Return the parameters and buffers of one network, as its model names them."""
        stacked = {**self._by_name(self.weights.detach()), **self._others}
        return {name: values[index] for name, values in stacked.items()}

    def _capture(
        self, images: Tensor, labels: Tensor
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Record a step; return the graph and its inputs."""
        images, labels = images.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that copy images may use CUDA meanwhile.
        with (
            paused_garbage_collection(),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            self._eager_step(self._full_batch_losses, images, labels)
        return graph, images, labels

    def _eager_step(
        self, compute_losses: Callable[..., Tensor], images: Tensor, labels: Tensor
    ) -> None:
        images, labels = images[self._stream_of], labels[self._stream_of]
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            losses = compute_losses(self.weights, self._others, images, labels)
        # A network's loss does not depend on the weights of the others.
        (gradient,) = torch.autograd.grad(losses.sum(), self.weights)
        self._update(gradient, losses.detach(), labels.shape[1])

    @torch.no_grad()
    def _update(self, gradient: Tensor, losses: Tensor, images: int) -> None:
        is_finite = torch.isfinite(losses) & torch.isfinite(gradient.abs().amax(1))
        self.bad |= ~is_finite
        self.good_steps += ~self.bad
        self.loss_sum += losses.double() * images
        if self.config.clip_grad_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient *= (self.config.clip_grad_norm / (norm + 1e-6)).clamp(max=1)
        self._momentum.mul_(self.config.momentum).add_(gradient)
        if self.config.weight_decay:
            self._momentum.addcmul_(self._weight_decay, self.weights)
        lr = self._lr.index_select(0, self._step)[0, :, None]
        self.weights -= torch.where(self.bad[:, None], 0, lr * self._momentum)
        self._step += 1

    def _losses(
        self, weights: Tensor, others: dict[str, Tensor], images: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the loss of each network on its own images."""

        def loss(trained: Any, others: Any, images: Tensor, labels: Tensor) -> Tensor:
            logits = functional_call(self._template, (trained, others), (images,))
            return self._objective.loss(logits, labels)

        return vmap(loss)(self._by_name(weights), others, images, labels)

    def _by_name(self, weights: Tensor) -> dict[str, Tensor]:
        """Return views of the trained parameters, (networks, *shape)."""
        parts = zip(self._shapes.items(), weights.split(self._sizes, 1), strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in parts}

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


def _template(model: nn.Module, autocast: torch.dtype | None) -> nn.Module:
    """Return a copy of the model without values, to be called with stacked ones."""
    template = copy.deepcopy(model).to("meta").train()
    if autocast is None:
        return template

    def to_fp32(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].float(),)

    def to_autocast(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output.to(autocast)

    # vmap's backward of BatchNorm needs maps and statistics of one dtype. BatchNorm itself computes
    # in fp32, so the result is the same.
    for module in template.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.register_forward_pre_hook(to_fp32)
            module.register_forward_hook(to_autocast)
    return template
