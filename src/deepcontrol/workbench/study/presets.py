"""How large a study is: on which data, at which size, for how long, over how many seeds."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..train.config import Train
from .arms import Arm
from .claims import CLAIMS

Name = Literal["quick", "camvid", "cityscapes"]


@dataclass(frozen=True)
class Preset:
    """What all runs of a study have in common."""

    name: Name
    data: str
    size: tuple[int, int]
    epochs: int
    seeds: int
    claims: tuple[str, ...]
    classnet_data: str
    width: float = 1.0
    rates_times: float = 1.0  # the paper's
    train_limit: int | None = None
    val_limit: int | None = None
    eval_batch_size: int = 16  # of all arms, whose validation loss is a mean over such batches
    save_epochs: int = 1
    # Claims of differences so small that they need more seeds than the others, and how many.
    close: tuple[str, ...] = ()
    seeds_if_close: int = 5
    note: str = ""  # what a reader of its verdicts has to know

    def config(self, arm: Arm, seed: int, out: Path, data_root: Path | None) -> Train:
        """One run of an arm."""
        settings: dict[str, Any] = {
            "out": out,
            "model": arm.model,
            "norm": arm.norm,
            "data": self.classnet_data if arm.model == "classnet" else self.data,
            "data_root": data_root,
            "size": self.size,
            "width": self.width,
            "batch_size": arm.batch,
            "lr": arm.rate,
            "epochs": self.epochs,
            "seed": seed,
            "init": arm.init,
            "fixed_lambda": arm.fixed_lambda,
            "fixed_gamma": arm.fixed_gamma,
            "class_weight_scale": arm.class_weight_scale,
            "clip_grad_norm": arm.clip_grad_norm,
            "train_limit": self.train_limit,
            "val_limit": self.val_limit,
            "sample_epochs": (1, self.epochs),
            "eval_batch_size": self.eval_batch_size,
            "save_epochs": self.save_epochs,
        }
        return Train(**settings)


EVERY_CLAIM = tuple(claim.id for claim in CLAIMS)
CITYSCAPES = Preset(
    name="cityscapes",
    data="cityscapes",
    classnet_data="cityscapes14",
    size=(256, 512),
    epochs=150,
    seeds=3,
    claims=EVERY_CLAIM,
    # At the spread of the first runs on CamVid, three seeds would leave fig1b undecided in 29% of
    # the cases where it is true, and five in less than 1% (benchmarks/power.py).
    close=("fig1a", "fig1b"),
    save_epochs=10,
)
PRESETS: dict[Name, Preset] = {
    "quick": Preset(
        name="quick",
        data="streets",
        classnet_data="streets",
        size=(32, 64),
        width=0.3125,
        # Minutes are few steps, and AGC's first hundreds at the paper's rates learn little more
        # than how frequent each class is.
        rates_times=4.0,
        # At 9 some of AGC's runs had only just left the plateau that they start on.
        epochs=13,
        seeds=2,
        claims=("fig1b", "fig1a", "fig1a-alike", "fig1c", "fig1e", "single-sample"),
        train_limit=64,
        val_limit=16,
        note="This shows how a study works. Its size and rates were chosen by looking at such "
        "runs, and so was what fig1a asks for. A few hundred steps on drawn scenes say little of "
        "the paper: that takes the presets camvid or cityscapes, and a GPU.",
    ),
    "camvid": replace(
        CITYSCAPES,
        name="camvid",
        data="camvid",
        classnet_data="camvid",
        note="CamVid is not the paper's data: 367 images to train on, where the paper had 2750, "
        "and 11 classes. Training sees random crops of them, some mirrored; validation sees "
        "all of each image, in two windows of the crops' size.",
    ),
    "cityscapes": CITYSCAPES,
}
