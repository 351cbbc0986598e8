"""What `deepcontrol reproduce` can be asked."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .claims import CLAIMS, Claim
from .presets import PRESETS, Name, Preset

ONLY = (
    "Train for these claims alone, such as fig1a,fig1b; for all of the preset's if none is named. "
    "Judged are those that the folder's study has been about before as well. There are: "
    f"{', '.join(claim.id for claim in CLAIMS)}."
)


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Put the paper's claims to the test: train what they need, judge each, write a page.

    Each claim has a rule, and ends as reproduced, not reproduced or undecided. Claims share their
    runs; those of figure 1 come first, one seed of each before the next seed, then all others, and
    at last more seeds where the differences are small.

    The same --out again goes on where it was stopped: finished runs are not repeated, runs that
    were cut short continue, failed ones are tried again. A run that fails does so alone, and is
    tried twice. Ctrl-C saves all runs and ends; a second one leaves at once.

    The exit code is 0 if no run failed and 1 if one did, or if nothing could be done; 130 and 143
    after SIGINT and SIGTERM.
    """

    out: Path
    """The study's folder: runs, logs, figures, study.json and the page, index.html."""
    preset: Name = "quick"
    """quick: small, on drawn streets, minutes on a CPU. camvid, cityscapes: the paper's protocol on
    real images (cityscapes is the paper's data)."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(help=ONLY)] = ()
    seeds: int | None = None
    """Seeds of each run, in place of the preset's number; a rule needs at least two."""
    epochs: int | None = None
    """Epochs of each run, in place of the preset's number; needs a folder of its own."""
    data_root: Path | None = None
    """The data set's folder; quick needs none."""
    executor: Literal["local", "ray"] = "local"
    """Who trains: processes on this machine, or tasks on a Ray cluster that shares --out."""
    slots: int | None = None
    """Runs at a time: on each GPU, or on this machine's CPU; 1 a GPU, 1 a core unless told. Several
    on one GPU take turns, and gain nothing, unless NVIDIA's MPS is running: then they fill it."""
    minutes: float | None = None
    """Start no run after this time and stop those that are under way, saved; the next call goes
    on. 0 trains nothing, and judges what is there. Saving and the page come after it."""
    last_start: float | None = None
    """Minutes after which no run is started, while those under way go on until --minutes: for a
    machine that keeps nothing, where a run that does not end is lost."""
    bench: Path | None = None
    """What `deepcontrol bench` wrote, for the claims about speed and memory; unless told,
    benchmarks/results/bench-cuda.csv, or what a packed study holds of it."""
    pack: Path | None = None
    """Copy what the verdicts rest on into this folder too, small enough to be committed, and make
    the page there: configurations, metrics, lambda, a few pictures, no checkpoints."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of runs that are over, for `eval` and `predict`: 0.6 GB each at full
    width. A study needs none."""
    dry_run: bool = False
    """List the runs and how far each is, and do nothing."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        for name in ("minutes", "last_start"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"--{name.replace('_', '-')} cannot be {value}")
        unknown = sorted(set(self.ids) - {claim.id for claim in CLAIMS})
        if unknown:
            known = ", ".join(claim.id for claim in CLAIMS)
            raise ValueError(f"--only: no claim {', '.join(unknown)}; there are {known}")

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids in --only, which may be apart by commas too."""
        return tuple(word for text in self.only for word in text.split(",") if word)

    @property
    def command(self) -> list[str]:
        """The command that comes to the same numbers, wherever the data lie; without what only
        says how and when runs are made."""
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
    def protocol(self) -> Preset:
        """The preset, with what was asked in place of its own."""
        preset = PRESETS[self.preset]
        if self.seeds is not None:
            preset = replace(preset, seeds=self.seeds, close=())
        return replace(preset, epochs=self.epochs or preset.epochs)

    def with_claims(self, ids: Collection[str]) -> "Reproduce":
        """The same about these claims besides, as far as they are known."""
        usual = set(PRESETS[self.preset].claims)
        both = set(self.ids or usual) | (set(ids) & {claim.id for claim in CLAIMS})
        return replace(self, only=() if both == usual else tuple(sorted(both)))

    @property
    def claims(self) -> tuple[Claim, ...]:
        wanted = self.ids or PRESETS[self.preset].claims
        times = PRESETS[self.preset].rates_times
        return tuple(claim.at_rates_times(times) for claim in CLAIMS if claim.id in wanted)
