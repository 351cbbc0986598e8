"""Next-frame segmentation with a convolutional GRU: AGC against other norms.

    python benchmarks/recurrent.py [--out benchmarks/results/recurrent-cuda.csv]

A camera pans over a wide `streets` scene at a varying speed. A network sees frames 1 to t and
predicts the labels of frame t + 1: a strided convolution, a GRU and a 1x1 convolution. The norm is
in the three gates of the GRU and nowhere else:

    agc            AGCConvGRU2d
    bn             BatchNorm, one set of running statistics for all steps
    bn-per-step    BatchNorm with running statistics of its own for each of the training's steps;
                   later steps use those of the last one
    ln, gn         GroupNorm with 1 and 8 groups
    none           biases only

Rules, fixed before the first run:

1. All contenders have the same layers, initialization (He), data, Adam with learning rate 0.002 and
   number of sequences. Nothing is tuned for one of them.
2. Training sequences have 8 frames, at batch 1 and at batch 4. Evaluation is on other scenes, in
   eval mode, at lengths 8, 16 and 32. The error is the share of wrong pixels in the last 4
   predictions of a sequence, so that length 32 measures steps that training never reached.
3. A norm serves in a recurrent network if its error at length 32 is at most 1.1 times its own error
   at length 8, in the mean over seeds, at both batch sizes.
4. The paper's claim that batch statistics "are not applicable" holds if AGC serves and neither
   BatchNorm does, or if the error of AGC at length 32 is below that of both at both batch sizes by
   more than two standard errors of the difference. Otherwise it does not hold here.

Each row of the CSV is one training. Trainings that the CSV already contains are skipped. The 36
trainings (6 norms, 2 batch sizes, 3 seeds) are planned for two minutes on an H200.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepcontrol import AGCConvGRU2d, TrainingStep, he_init_
from deepcontrol.workbench.bench.results import append_row, has_row, provenance
from streets import VOID, Class, render

HEIGHT, WIDTH, WIDE = 48, 64, 224  # of a frame, and the width of a scene
STEM, HIDDEN = 16, 32
LR, EVAL_SEQUENCES, LAST = 0.002, 16, 4
SPEED = 6.0  # fastest camera, in pixels per frame


class StepBatchNorm2d(nn.Module):
    """BatchNorm with common gain and bias and with running statistics for each step."""

    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.statistics = nn.ModuleList(
            nn.BatchNorm2d(channels, affine=False) for _ in range(steps)
        )

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.statistics[min(step, len(self.statistics) - 1)](x)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class NormGRU2d(nn.Module):
    """The GRU of AGCConvGRU2d with another norm after each gate's convolution."""

    def __init__(self, in_channels: int, hidden: int, make: Callable[[], nn.Module | None]) -> None:
        super().__init__()
        self.hidden = hidden
        norms = [make() for _ in range(3)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(in_channels + hidden, hidden, 3, padding=1, bias=norm is None)
            for norm in norms
        )
        self.norms = nn.ModuleList(nn.Identity() if norm is None else norm for norm in norms)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], self.hidden, *x.shape[3:])
        outputs = []
        for step, frame in enumerate(x):
            both = torch.cat([frame, h], 1)
            r, z = (torch.sigmoid(self.gate(i, both, step)) for i in (0, 1))
            n = torch.tanh(self.gate(2, torch.cat([frame, r * h], 1), step))
            h = n + z * (h - n)
            outputs.append(h)
        return torch.stack(outputs), h

    def gate(self, i: int, x: Tensor, step: int) -> Tensor:
        v, norm = self.convolutions[i](x), self.norms[i]
        return norm(v, step) if isinstance(norm, StepBatchNorm2d) else norm(v)


def make_gru(norm: str, steps: int) -> nn.Module:
    """Build the GRU of a contender."""
    if norm == "agc":
        return AGCConvGRU2d(STEM, HIDDEN, 3)
    makers: dict[str, Callable[[], nn.Module | None]] = {
        "bn": lambda: nn.BatchNorm2d(HIDDEN),
        "bn-per-step": lambda: StepBatchNorm2d(HIDDEN, steps),
        "ln": lambda: nn.GroupNorm(1, HIDDEN),
        "gn": lambda: nn.GroupNorm(8, HIDDEN),
        "none": lambda: None,
    }
    return NormGRU2d(STEM, HIDDEN, makers[norm])


NORMS = ("agc", "bn", "bn-per-step", "ln", "gn", "none")


class Predictor(nn.Module):
    """Frames (N, T, 3, H, W) to logits of the next frames, (N * T, classes, H, W)."""

    def __init__(self, norm: str, steps: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 3, stride=2, padding=1)
        self.gru = make_gru(norm, steps)
        self.head = nn.Conv2d(HIDDEN, len(Class), 1)

    def forward(self, frames: Tensor) -> Tensor:
        n, t = frames.shape[:2]
        features = torch.relu(self.stem(frames.flatten(0, 1))).unflatten(0, (n, t))
        states, _ = self.gru(features.transpose(0, 1))
        logits = self.head(states.transpose(0, 1).flatten(0, 1))
        return nn.functional.interpolate(logits, scale_factor=2.0, mode="bilinear")


def next_frame_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels.flatten(0, 1), ignore_index=VOID)


class Scenes:
    """Wide scenes, over which a camera pans.

    Args:
        seed: Of the scenes.
        count: Number of scenes.
        device: Where frames are cut out.
    """

    def __init__(self, seed: int, count: int, device: str) -> None:
        scenes = [render(seed, i, HEIGHT, WIDE) for i in range(count)]
        images = torch.from_numpy(np.stack([s.image for s in scenes])).to(device)
        self.images = images.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        self.labels = torch.from_numpy(np.stack([s.labels for s in scenes])).to(device).long()

    def sequences(self, count: int, length: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Cut out frames (count, length, 3, H, W) and the labels of the next frames."""
        scene = torch.from_numpy(rng.integers(len(self.images), size=count))
        left = torch.from_numpy(pan(count, length + 1, rng))
        columns = (left[..., None] + torch.arange(WIDTH)).to(self.images.device)
        scene = scene.to(self.images.device)
        images, labels = self.images[scene], self.labels[scene]
        frames = [
            images.gather(3, c[:, None, None, :].expand(-1, 3, HEIGHT, -1))
            for c in columns[:, :-1].unbind(1)
        ]
        following = [
            labels.gather(2, c[:, None, :].expand(-1, HEIGHT, -1)) for c in columns[:, 1:].unbind(1)
        ]
        return torch.stack(frames, 1), torch.stack(following, 1)


def pan(count: int, steps: int, rng: np.random.Generator) -> Any:
    """Return each frame's left column (count, steps), for cameras of varying speed.

    A camera turns around at the ends of the scene.

    >>> columns = pan(2, 50, np.random.default_rng(0))
    >>> columns.shape, bool(columns.min() >= 0), bool(columns.max() <= WIDE - WIDTH)
    ((2, 50), True, True)
    """
    last = WIDE - WIDTH
    position, speed = rng.uniform(0, last, count), rng.uniform(-SPEED, SPEED, count)
    found = []
    for _ in range(steps):
        found.append(np.rint(position).astype(np.int64))
        speed = np.clip(speed + rng.normal(0, 0.7, count), -SPEED, SPEED)
        position = position + speed
        outside = (position < 0) | (position > last)
        position = np.clip(np.where(position < 0, -position, position), 0, None)
        position = np.where(position > last, 2 * last - position, position)
        speed = np.where(outside, -speed, speed)
    return np.stack(found, 1)


def train(norm: str, batch: int, seed: int, scenes: Scenes, flags: argparse.Namespace) -> nn.Module:
    """Train a contender on `flags.sequences` sequences."""
    torch.manual_seed(seed)
    model = he_init_(Predictor(norm, flags.train_length)).to(flags.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, capturable=flags.device == "cuda")
    step = TrainingStep(model, next_frame_loss, optimizer)
    rng = np.random.default_rng(seed)
    for _ in range(flags.sequences // batch):
        step(*scenes.sequences(batch, flags.train_length, rng))
    return model


@torch.no_grad()
def errors(model: nn.Module, scenes: Scenes, lengths: list[int]) -> dict[str, str]:
    """Return error and loss of the last predictions in sequences of each length."""
    model.eval()
    columns = {}
    for length in lengths:
        frames, labels = scenes.sequences(EVAL_SEQUENCES, length, np.random.default_rng(0))
        logits = model(frames).unflatten(0, labels.shape[:2])[:, -LAST:].flatten(0, 1)
        labels = labels[:, -LAST:]
        known = labels != VOID
        wrong = (logits.argmax(1).view_as(labels) != labels) & known
        columns[f"error_{length}"] = f"{float(wrong.sum() / known.sum()):.4f}"
        columns[f"loss_{length}"] = f"{float(next_frame_loss(logits, labels)):.4f}"
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--norms", nargs="+", default=[*NORMS], choices=NORMS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sequences", type=int, default=1200, help="training sequences")
    parser.add_argument("--train-length", type=int, default=8, help="frames of each")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32], help="of evaluation")
    parser.add_argument("--scenes", type=int, default=96, help="training scenes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags = parser.parse_args()
    out = flags.out or Path(f"benchmarks/results/recurrent-{flags.device}.csv")
    here = provenance(flags.device)
    training = Scenes(0, flags.scenes, flags.device)
    validation = Scenes(1, max(2, flags.scenes // 4), flags.device)
    for seed in flags.seeds:
        for batch in flags.batches:
            for norm in flags.norms:
                key = {
                    "norm": norm,
                    "batch": batch,
                    "seed": seed,
                    "sequences": flags.sequences,
                    "train_length": flags.train_length,
                    "scenes": flags.scenes,
                    "device": flags.device,
                }
                if has_row(out, key):
                    continue
                begin = time.perf_counter()
                model = train(norm, batch, seed, training, flags)
                row = key | errors(model, validation, flags.lengths)
                row["seconds"] = f"{time.perf_counter() - begin:.1f}"
                append_row(out, row | here)
                print(*row.values(), sep=", ", flush=True)


if __name__ == "__main__":
    main()
