"""What `deepcontrol train` can be asked, and how a run folder remembers it."""

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ...step import Engine
from ..models import Norm
from ..optim import HIGHEST_MOMENTUM, learning_rate
from ..runfolder import write_atomic
from ..sizes import Size

FORMAT = 1  # of config.json
CONFIG = "config.json"
HIGHEST = 2**63 - 1  # of any whole number: what torch's generators take, for one
SMALLEST = 32  # pixels a side: SegNet halves them five times

# What may differ when a run is continued: no number of the run depends on it. More epochs are the
# same run for longer, because the rate is fixed. The data may have moved: they are told by their
# content.
FREE = ("epochs", "workers", "save_steps", "sample_epochs", "out", "data_root")
# Flags that came later than the format, and how runs from before them were made.
LATER = {"clip_grad_norm": None, "eval_whole": True}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a network, or go on with a run that was interrupted: the defaults are the paper's.

    The run folder gets the configuration, a line of metrics an epoch, TensorBoard's events,
    pictures and checkpoints. The same --out again continues from its last checkpoint with the
    configuration it was started with; a flag that would change the run is refused.

    The exit code is 0 when all epochs are done, 1 after an error, 2 for a wrong flag, 130 and 143
    after SIGINT and SIGTERM: those finish the step and save first. A second SIGINT leaves at once.

    On several GPUs: torchrun --nproc-per-node 8 -m deepcontrol train ...
    """

    out: Path
    """The run folder; one that is there already is continued."""
    model: Literal["segnet", "classnet"] = "segnet"
    """The network. classnet also learns contours, from the data's instances."""
    norm: Norm = "agc"
    """The normalization: agc (automatic gain control), bn, gn, in, frn or none."""
    data: Literal["streets", "camvid", "cityscapes", "cityscapes14"] = "streets"
    """The data set; cityscapes14 is Cityscapes in ClassNet's 14 classes."""
    data_root: Path | None = None
    """The data set's folder; streets needs none."""
    size: Size = (256, 512)
    """The images' size in training. Larger ones are cropped, and evaluated in windows of this size
    whose labels are put together."""
    width: float = 1.0
    """Scales the number of filters in every layer."""
    batch_size: int = 4
    """Images in a step, over all processes together."""
    lr: float | None = None
    """The learning rate; 0.02 x batch size unless told otherwise. It stays as it is."""
    momentum: float = 0.9
    """SGD's momentum, at most 0.999."""
    clip_grad_norm: float | None = None
    """Scale a step's gradient down to this norm if its own is larger. The paper does not; at rates
    far above its own, where AGC can diverge, 1 is a first try."""
    epochs: int = 150
    """How often every image is seen. A run can be continued with more."""
    seed: int = 0
    """Of the filters, of the images' order and of their augmentation."""
    init: Literal["he", "identity", "unit"] = "he"
    """How the filters start: He fan-in, or the identity wherever a layer can be one, as in the
    paper; or scaled so that every neuron activates maps of variance 1, which AGC learns from
    sooner."""
    fixed_lambda: float | None = None
    """Keep lambda, the share of the mean that AGC subtracts, at this value; else it is learned."""
    fixed_gamma: float | None = None
    """Keep gamma, AGC's gain, at this value; else it is learned."""
    class_weight_scale: float = 1.0
    """The mean of the classes' weights in the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16 is autocast, the parameters stay fp32; auto is bf16 on a GPU and fp32 on a CPU."""
    engine: Engine = "graph"
    """How a step runs; see TrainingStep. Without a GPU, graph is eager."""
    deterministic: bool = False
    """The same bits in every run on a GPU too, at some cost; on a CPU they are the same anyway."""
    fsdp: bool = False
    """Shard parameters, gradients and momentum over the processes (FSDP2), for large models."""
    train_limit: int | None = None
    """Train on the first so many images alone."""
    val_limit: int | None = None
    """Evaluate on the first so many images alone."""
    workers: int = 0
    """Threads that make batches ahead of their use. Whatever the number, the batches are equal.
    Data that a GPU holds need none."""
    eval_batch_size: int | None = None
    """Images evaluated at once, over all processes; --batch-size unless told otherwise. More take
    less time and more memory."""
    eval_whole: bool = False
    """Evaluate images that are larger than --size whole. AGC's means are then not those of
    training, and its error is higher for it."""
    save_epochs: int = 1
    """Save at the end of every so many epochs, and of the last one. `best` is the best of these
    epochs. Training does not wait for the disk: what it is too slow for is not written."""
    save_steps: int = 0
    """Save after every so many steps too; 0 is at the end of epochs alone."""
    sample_epochs: tuple[int, ...] = (1, 10, 50, 100, 150)
    """Draw a few validation images with their predictions after these epochs."""

    def __post_init__(self) -> None:
        at_least = dict.fromkeys(("batch_size", "epochs", "save_epochs"), 1)
        at_least |= dict.fromkeys(("seed", "workers", "save_steps"), 0)
        for name in ("train_limit", "val_limit", "eval_batch_size"):
            if getattr(self, name) is not None:
                at_least[name] = 1
        for name, least in at_least.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"--{_flag(name)} must be at least {least}, got {value}")
            if value > HIGHEST:
                raise ValueError(f"--{_flag(name)} must be at most {HIGHEST}, got {value}")
        if min(self.size) < SMALLEST:
            size = "x".join(map(str, self.size))
            raise ValueError(f"--size must be at least {SMALLEST}x{SMALLEST}, got {size}")
        if not 0 < self.width <= 16:
            raise ValueError(f"--width must be above 0 and at most 16, got {self.width}")
        for name in ("lr", "clip_grad_norm", "class_weight_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{_flag(name)} must be positive, got {value}")
        if self.init == "unit" and self.norm != "agc":
            raise ValueError(f"--init unit is for --norm agc, not {self.norm}")
        for name in ("fixed_lambda", "fixed_gamma"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.norm != "agc":
                raise ValueError(f"--{_flag(name)} is for --norm agc, not {self.norm}")
            if not math.isfinite(value):
                raise ValueError(f"--{_flag(name)} must be a number, got {value}")
        if not 0 <= self.momentum <= HIGHEST_MOMENTUM:
            raise ValueError(
                f"--momentum must be from 0 to {HIGHEST_MOMENTUM}, got {self.momentum}"
            )

    @property
    def rate(self) -> float:
        return learning_rate(self.batch_size) if self.lr is None else self.lr

    @property
    def window(self) -> Size | None:
        """In which larger images are evaluated; None for whole ones."""
        return None if self.eval_whole else self.size

    @property
    def evaluated_at_once(self) -> int:
        return self.batch_size if self.eval_batch_size is None else self.eval_batch_size


class ConfigChangedError(ValueError):
    """A run cannot go on as another one."""


def load_config(run: Path) -> tuple[Train, dict[str, Any]]:
    """The configuration of a run, and what was derived from it: rate, classes, counts.

    Its `out` is `run`, wherever the folder lies by now: a run folder that came from elsewhere
    cannot have anything written outside of itself.
    """
    path = run / CONFIG
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{run} is no run folder: it has no {CONFIG}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}")
    config, derived = content.get("config"), content.get("derived")
    if not isinstance(config, dict) or not isinstance(derived, dict):
        raise ValueError(f"{path} has no config")
    try:
        return from_json({**config, "out": str(run)}), derived
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_config(config: Train, derived: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write config.json, whole or not at all; `about` says by which code it was made."""
    content = {"format": FORMAT, "config": to_json(config), "derived": derived, **about}
    write_atomic(config.out / CONFIG, json.dumps(content, indent=2) + "\n")


def check_unchanged(config: Train, before: Train) -> None:
    """ConfigChangedError, with every difference shown, unless `config` is the same run."""
    found = differences(config, before)
    if found:
        raise ConfigChangedError(
            f"{config.out} was started differently: {', '.join(found)}. "
            "Leave these flags out to continue it, or choose another --out."
        )


def differences(config: Train, before: Train) -> list[str]:
    """What of `before` would be another run in `config`: --lr 0.5 -> 0.25."""
    return [
        f"--{_flag(f.name)} {_shown(getattr(before, f.name))} -> {_shown(getattr(config, f.name))}"
        for f in fields(Train)
        if f.name not in FREE and getattr(before, f.name) != getattr(config, f.name)
    ]


def to_json(config: Train) -> dict[str, Any]:
    """All fields as JSON has them: paths as text, tuples as lists."""
    values = {f.name: getattr(config, f.name) for f in fields(Train)}
    return {
        name: str(value) if isinstance(value, Path) else list(value) if type(value) is tuple
        else value
        for name, value in values.items()
    }  # fmt: skip


def from_json(values: Mapping[str, Any]) -> Train:
    hints = typing.get_type_hints(Train)
    values = {**LATER, **values}
    unknown, missing = set(values) - set(hints), set(hints) - set(values)
    if unknown or missing:
        what = [f"unknown {name}" for name in sorted(unknown)]
        raise ValueError(", ".join(what + [f"no {name}" for name in sorted(missing)]))
    return Train(**{name: _typed(name, values[name], hint) for name, hint in hints.items()})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """A JSON value as the type of its field; ValueError if it is not one."""
    kind = typing.get_origin(hint)
    if kind in (types.UnionType, typing.Union):
        optional = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _typed(name, value, optional[0])
    if kind is Literal and value in typing.get_args(hint):
        return value
    if kind is tuple and isinstance(value, list) and all(type(v) is int for v in value):
        if name != "size" or (len(value) == 2 and min(value) > 0):
            return tuple(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} is too large for a number with a fraction") from None
    elif type(value) is hint:
        return value
    raise ValueError(f"{name} cannot be {value!r}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value)
