"""Settings of `deepcontrol reproduce`: the presets and the command line."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..folders.studyfolder import Protocol
from ..models import task_of
from ..optim import recipe
from ..train.config import Model, Train
from .arms import Arm, Tuned
from .claims import CLAIMS, Claim
from .classification import (
    BATCH_CLAIMS,
    BATCH_SWEEP,
    DEPTH_CLAIMS,
    DEPTH_SWEEPS,
    LONG_CLAIMS,
    LONG_SWEEP,
    MLP_CLAIMS,
    MLP_SWEEP,
    PLAIN,
    RESIDUAL,
)
from .figure import FIGURE_2, PanelSpec, SweepSpec
from .proposals import (
    PROPOSAL_CLAIMS,
    PROPOSAL_PANELS,
    RECIPE_CLAIMS,
    RECIPE_PANELS,
)

Name = Literal[
    "quick",
    "camvid",
    "cityscapes",
    "cifar-batch",
    "cifar-depth",
    "cifar-long",
    "fashion-mlp",
    "proposals",
    "proposals-small",
    "segmentation-recipe",
]


@dataclass(frozen=True, kw_only=True)
class Preset(Protocol):
    """A protocol, and the claims and seeds of a study that follows it."""

    name: Name
    seeds: int
    claims: tuple[str, ...]
    save_epochs: int = 1
    # Claims about differences so small that they need more seeds than the others.
    close: tuple[str, ...] = ()
    seeds_if_close: int = 5
    note: str = ""  # shown with the verdicts
    catalog: tuple[Claim, ...] = CLAIMS  # the claims that --only can name
    sweeps: tuple[SweepSpec, ...] = ()
    panels: tuple[PanelSpec, ...] = FIGURE_2  # panels of the figure with comparisons
    # Network and batch size of the runs, in training order; empty for the order of figure 1 or, if
    # the claims are not the paper's, of the claims.
    stages: tuple[tuple[Model, int], ...] = ()

    @property
    def protocol(self) -> Protocol:
        """Return the part that cannot change within a study folder.

        Seeds and claims can be added, and no result depends on how often a run is saved.
        """
        return Protocol(**{f.name: getattr(self, f.name) for f in fields(Protocol)})

    @property
    def is_of_paper(self) -> bool:
        """Whether the claims are those of the first part, on the paper's own experiments."""
        return self.catalog is CLAIMS

    @property
    def has_tuned(self) -> bool:
        """Whether runs depend on results: the other seeds of each best learning rate."""
        contenders = (c for claim in self.catalog for c in claim.contenders)
        return any(isinstance(contender, Tuned) for contender in contenders)

    def config(self, arm: Arm, seed: int, out: Path, data_root: Path | None) -> Train:
        """Return the configuration of one run of an arm.

        All runs have the default engine, "graph". Runs trained with another one count as well: for
        norms without fused kernels "compile+graph" is faster at small batches.
        """
        is_classification = task_of(arm.model) == "classification"
        settings: dict[str, Any] = {
            "out": out,
            "model": arm.model,
            "norm": arm.norm,
            "data": self.classnet_data if arm.model == "classnet" else self.data,
            "data_root": data_root,
            "size": self.size,
            "width": self.width,
            "batch_size": arm.batch,
            "lr": arm.lr,
            "epochs": self.epochs,
            "seed": seed,
            "init": arm.init,
            "fixed_lambda": arm.fixed_lambda,
            "fixed_gamma": arm.fixed_gamma,
            "class_weight_scale": arm.class_weight_scale,
            "clip_grad_norm": arm.clip_grad_norm,
            "train_limit": self.train_limit,
            "val_limit": self.val_limit,
            "sample_epochs": (self.epochs,) if is_classification else (1, self.epochs),
            "schedule": self.schedule,
            "warmup_epochs": self.warmup_epochs,
            "weight_decay": self.weight_decay,
            "augment": self.augment,
            "eval_batch_size": self.eval_batch_size,
            "save_epochs": self.save_epochs,
            "class_weights": self.class_weights,
        }
        return Train(**(settings | dict(arm.options)))


OF_PAPER = tuple(claim.id for claim in CLAIMS)  # and some of ours, on the same networks
CITYSCAPES = Preset(
    name="cityscapes",
    data="cityscapes",
    classnet_data="cityscapes14",
    size=(256, 512),
    epochs=150,
    seeds=3,
    claims=OF_PAPER,
    # With the variance of the first runs on CamVid, three seeds leave fig1b undecided in 29% of
    # the cases in which it is true, and five seeds in less than 1% (benchmarks/power.py).
    close=("fig1a", "fig1b"),
    save_epochs=10,
)
CAMVID = replace(
    CITYSCAPES,
    name="camvid",
    data="camvid",
    classnet_data="camvid",
    note="CamVid is not the paper's data set: it has 367 training images instead of 2750, and "
    "11 classes. Training uses random crops, half of them mirrored. Validation uses the whole "
    "image, in two windows of the crops' size.",
)
CIFAR_BATCH = Preset(
    name="cifar-batch",
    data="cifar10",
    classnet_data="cifar10",
    size=(32, 32),
    epochs=3,
    seeds=3,
    schedule="cosine",
    warmup_epochs=0.25,
    weight_decay=5e-4,
    eval_batch_size=1000,
    save_epochs=1000,
    claims=tuple(claim.id for claim in BATCH_CLAIMS),
    catalog=BATCH_CLAIMS,
    sweeps=(BATCH_SWEEP,),
    # Most informative first for their time: a run at batch 1 takes eight times as long as one at 8.
    stages=tuple(("resnet20", batch) for batch in (8, 128, 4, 2, 1, 32)),
    note="A short protocol: 3 epochs, where the usual one has 200. The number of images is equal "
    "at all batch sizes, so that small batches take more steps. Errors are test errors: CIFAR-10 "
    "has no validation set, and the best learning rate of each contender is chosen by the test "
    "error of its first seed, from the same grid for all.",
)
PROPOSALS = replace(
    CAMVID,
    name="proposals",
    size=(192, 256),
    width=0.5,
    epochs=40,
    schedule="cosine",
    warmup_epochs=1.0,
    save_epochs=1000,
    claims=tuple(claim.id for claim in PROPOSAL_CLAIMS),
    close=(),
    catalog=PROPOSAL_CLAIMS,
    panels=PROPOSAL_PANELS,
    note="A short protocol: SegNet at half its width, crops of a quarter of the image, 40 "
    "epochs, a cosine schedule. Learning rates are the paper's, not tuned.",
)
# The recipe's settings; the arms have their own norms.
BEST = {name: a for name, a in recipe("best", 40)._asdict().items() if name != "norm"}
PRESETS: dict[Name, Preset] = {
    "quick": Preset(
        name="quick",
        data="streets",
        classnet_data="streets",
        size=(32, 64),
        width=0.3125,
        # A few minutes are few steps. In its first hundreds of steps at the paper's learning
        # rates, AGC learns little more than the frequency of each class.
        lr_scale=4.0,
        # After 9 epochs some of AGC's runs had only just left the initial plateau.
        epochs=13,
        seeds=2,
        claims=("fig1b", "fig1a", "fig1a-alike", "fig1c", "fig1e", "single-sample"),
        train_limit=64,
        val_limit=16,
        note="This preset shows how a study works. Its size, its learning rates and the margin of "
        "fig1a were chosen by looking at such runs. A few hundred steps on synthetic scenes say "
        "little about the paper: use the presets camvid or cityscapes and a GPU for that.",
    ),
    "camvid": CAMVID,
    "cityscapes": CITYSCAPES,
    "cifar-batch": CIFAR_BATCH,
    "cifar-depth": replace(
        CIFAR_BATCH,
        name="cifar-depth",
        epochs=6,
        claims=tuple(claim.id for claim in DEPTH_CLAIMS),
        catalog=DEPTH_CLAIMS,
        sweeps=DEPTH_SWEEPS,
        stages=tuple((of[depth], 128) for of in (RESIDUAL, PLAIN) for depth in of),
        note="A short protocol: 6 epochs, where the usual one has 200. Errors are test errors: "
        "CIFAR-10 has no validation set, and the best learning rate of each contender is chosen by "
        "the test error of its first seed.",
    ),
    "cifar-long": replace(
        CIFAR_BATCH,
        name="cifar-long",
        epochs=200,
        seeds=2,
        claims=tuple(claim.id for claim in LONG_CLAIMS),
        catalog=LONG_CLAIMS,
        sweeps=(LONG_SWEEP,),
        stages=(("resnet20", 128),),
        note="The usual number of epochs, with a cosine schedule; He et al. divide the learning "
        "rate by 10 twice. Errors are test errors: CIFAR-10 has no validation set, and the better "
        "of two learning rates is chosen by the test error of the first seed.",
    ),
    "fashion-mlp": replace(
        CIFAR_BATCH,
        name="fashion-mlp",
        data="fashion-mnist",
        classnet_data="fashion-mnist",
        size=(28, 28),
        epochs=10,
        augment="none",
        claims=tuple(claim.id for claim in MLP_CLAIMS),
        catalog=MLP_CLAIMS,
        sweeps=(MLP_SWEEP,),
        stages=(("mlp", 64), ("mlp", 4)),
        note="Errors are test errors: Fashion-MNIST has no validation set, and the best learning "
        "rate of each contender is chosen by the test error of its first seed, from the same grid "
        "for all. Images are not augmented.",
    ),
    "proposals": PROPOSALS,
    "proposals-small": replace(
        PROPOSALS,
        name="proposals-small",
        size=(64, 96),
        width=0.125,
        # At the paper's learning rates a network of this size learns slowly.
        lr_scale=2.0,
        epochs=20,
        note="A protocol for a CPU: SegNet at an eighth of its width, images of 64x96, 20 epochs, "
        "a cosine schedule, twice the paper's learning rates. It says how the mechanisms act in a "
        "small network that is not trained to the end.",
    ),
    "segmentation-recipe": replace(
        CAMVID,
        name="segmentation-recipe",
        epochs=40,
        **BEST,
        save_epochs=1000,
        claims=tuple(claim.id for claim in RECIPE_CLAIMS),
        close=(),
        catalog=RECIPE_CLAIMS,
        panels=RECIPE_PANELS,
        note="All runs have the settings of `deepcontrol train --recipe best`. They were fixed "
        "before the runs and not searched on these images. BatchNorm has the best of five "
        "learning rates, chosen by the validation error of the first seed, which is to its "
        "advantage; AGC has one.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Test claims: train the runs, judge each claim, write a page.

    Each claim has a rule and ends as reproduced, not reproduced or undecided. Several claims may
    use the same run. The runs of figure 1 come first, one seed of each before the next seed. The
    other runs follow, and then more seeds for claims about small differences. The classification
    presets train one network and batch size after another; proposals and segmentation-recipe train
    the runs of one claim after another.

    In the classification presets all contenders, and in segmentation-recipe BatchNorm, are tuned:
    the first seed tries every learning rate of a grid, and the other seeds use the best one.

    Run the same command again to resume a study: finished runs are kept, interrupted runs
    continue, and failed runs are tried again. A failed run is tried twice and does not stop the
    others. Ctrl-C saves all runs and exits; a second Ctrl-C exits at once.

    Exit code: 0 if no run failed, 1 if one failed or the settings are wrong, 130 after SIGINT, 143
    after SIGTERM.
    """

    out: Path
    """Study folder: runs, logs, figures, study.json and index.html."""
    preset: Name = "quick"
    """quick: small networks on synthetic street scenes, minutes on a CPU. camvid, cityscapes: the
    paper's protocol on real images. The paper used cityscapes. cifar-batch, cifar-depth: error of
    ResNets on CIFAR-10 by batch size and by depth. cifar-long: ResNet-20 after 200 epochs.
    fashion-mlp: a fully connected network on Fashion-MNIST. proposals: noise, GEMS, backgrounds,
    momentum and lambda in short runs on CamVid. proposals-small: the same in a network that a CPU
    trains. segmentation-recipe: `train --recipe best` with AGC and BatchNorm on CamVid."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLAIM...")] = ()
    """Train only the runs that these claims need, for example fig1a,fig1b. Default: all claims of
    the preset. Claims already in the study folder are judged as well. --dry-run lists the ids."""
    seeds: int | None = None
    """Number of seeds per arm. Default: the preset's. A rule needs at least two."""
    epochs: int | None = None
    """Number of epochs per run. Default: the preset's. Needs a separate study folder."""
    data_root: Path | None = None
    """Dataset folder. Not needed for quick."""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: tasks on a Ray cluster that shares --out."""
    slots: int | None = None
    """Number of simultaneous runs per GPU, or on the CPU. Default: 1 per GPU, or 1 per core. More
    than one per GPU is faster only with NVIDIA MPS."""
    at_once: int = 1
    """Number of classifiers that one process trains at once. Runs that differ only in seed and
    learning rate become one vectorized network. At batch sizes 1 and 2 its steps take hardly longer
    than those of a single network. It has no checkpoints: an interrupted ensemble starts again."""
    minutes: float | None = None
    """Time limit. After it, runs are saved and stopped; the same command resumes them. 0 trains
    nothing and judges the finished runs. Saving and the page take extra time."""
    last_start: float | None = None
    """Start no run after this many minutes, but let running ones continue until --minutes. For
    machines with a temporary disk, where an unfinished run is lost."""
    bench: Path | None = None
    """CSV file of `deepcontrol bench`, for the claims about speed and memory. Default:
    benchmarks/results/bench-cuda.csv, or the rows in a packed study."""
    pack: Path | None = None
    """Also copy the results into this folder and write the page there. The copy is small enough
    to commit: configurations, metrics, lambda and a few pictures, no checkpoints."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs for `eval` and `predict`: 0.6 GB each at full width."""
    dry_run: bool = False
    """List the claims, the runs and their progress, count images and steps, and exit."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "slots", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.at_once > 1 and self.executor == "ray":
            raise ValueError("--at-once needs --executor local: a Ray task trains a single run")
        for name in ("minutes", "last_start"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
        known = self.known_ids
        if self.only and not self.ids:
            raise ValueError(
                "--only names no claim: name some, for example fig1a,fig1b, or omit it"
            )
        unknown = sorted(set(self.ids) - set(known))
        if unknown:
            raise ValueError(
                f"--only: unknown claim {', '.join(unknown)} for --preset {self.preset}; choose "
                f"from {', '.join(known)}"
            )

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids in --only, separated by spaces or commas."""
        return tuple(word for text in self.only for word in text.split(",") if word)

    @property
    def command(self) -> list[str]:
        """The command that reproduces the numbers, without options for time and place."""
        words = ["deepcontrol", "reproduce", "--preset", self.preset]
        if self.ids:
            words += ["--only", ",".join(self.ids)]
        for name in ("seeds", "epochs"):
            if getattr(self, name) is not None:
                words += [f"--{name}", str(getattr(self, name))]
        if self.data_root is not None:
            words += ["--data-root", self.data_root.name]
        return [*words, "--out", self.out.name]

    @property
    def effective_preset(self) -> Preset:
        """The preset with --seeds and --epochs applied."""
        preset = PRESETS[self.preset]
        if self.seeds is not None:
            preset = replace(preset, seeds=self.seeds, close=())
        return replace(preset, epochs=self.epochs or preset.epochs)

    def with_claims(self, ids: Collection[str]) -> "Reproduce":
        """Add claims. Ids that this version does not know are left out."""
        usual = set(PRESETS[self.preset].claims)
        both = set(self.ids or usual) | (set(ids) & set(self.known_ids))
        return replace(self, only=() if both == usual else tuple(sorted(both)))

    @property
    def claims(self) -> tuple[Claim, ...]:
        preset = PRESETS[self.preset]
        wanted = self.ids or preset.claims
        return tuple(
            claim.scale_lr(preset.lr_scale) for claim in preset.catalog if claim.id in wanted
        )

    @property
    def known_ids(self) -> tuple[str, ...]:
        """The ids of all claims that --only can name."""
        return tuple(claim.id for claim in PRESETS[self.preset].catalog)
