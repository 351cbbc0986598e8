"""What `deepcontrol reproduce` can be asked."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .claims import CLAIMS, Claim
from .presets import PRESETS, Name, Preset


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Put the paper's claims to the test: train what they need, judge each, write a page.

    Each claim has a rule that was fixed beforehand, and ends as reproduced, not reproduced or
    undecided. Claims share their runs; those that tell most come first, and one seed of everything
    before the next seed.

    The same --out again goes on where it was stopped: finished runs are not repeated, runs that
    were cut short continue, failed ones are tried again. A run that fails does so alone, and is
    tried twice. Ctrl-C saves all runs and ends; a second one leaves at once.

    The exit code is 0 if no run failed and 1 if one did, 130 and 143 after SIGINT and SIGTERM.
    """

    out: Path
    """The study's folder: runs, logs, figures, study.json and the page, index.html."""
    preset: Name = "quick"
    """quick: small, on drawn streets, minutes on a CPU. camvid, cityscapes: the paper's protocol on
    real images (cityscapes is the paper's data)."""
    only: tuple[str, ...] = ()
    """Claims by their ids, such as fig1a,fig1b; all of the preset's if none is named."""
    seeds: int | None = None
    """Seeds of each run, in place of the preset's number; a rule needs at least two."""
    epochs: int | None = None
    """Epochs of each run, in place of the preset's number; needs a folder of its own."""
    data_root: Path | None = None
    """The data set's folder; quick needs none."""
    executor: Literal["local", "ray"] = "local"
    """Who trains: processes on this machine, or tasks on a Ray cluster that shares --out."""
    slots: int | None = None
    """Runs at a time: on each GPU, or on this machine's CPU; 1 a GPU, 1 a core unless told."""
    minutes: float | None = None
    """Start no run after this time and stop those that are under way, saved; the next call goes
    on. 0 trains nothing, and judges what is there."""
    bench: Path = Path("benchmarks/results/bench-cuda.csv")
    """What `deepcontrol bench` wrote, for the claims about speed and memory."""
    pack: Path | None = None
    """Copy what the verdicts rest on into this folder too, small enough to be committed, and make
    the page there: configurations, metrics, lambda, a few pictures, no checkpoints."""
    dry_run: bool = False
    """List the runs and how far each is, and do nothing."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.minutes is not None and not self.minutes >= 0:
            raise ValueError(f"--minutes cannot be {self.minutes}")
        unknown = sorted(set(self.ids) - {claim.id for claim in CLAIMS})
        if unknown:
            known = ", ".join(claim.id for claim in CLAIMS)
            raise ValueError(f"--only: no claim {', '.join(unknown)}; there are {known}")

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids in --only, which may be apart by commas too."""
        return tuple(word for text in self.only for word in text.split(",") if word)

    @property
    def protocol(self) -> Preset:
        """The preset, with what was asked in place of its own."""
        preset = PRESETS[self.preset]
        return replace(
            preset, seeds=self.seeds or preset.seeds, epochs=self.epochs or preset.epochs
        )

    @property
    def claims(self) -> tuple[Claim, ...]:
        wanted = self.ids or PRESETS[self.preset].claims
        times = PRESETS[self.preset].rates_times
        return tuple(claim.at_rates_times(times) for claim in CLAIMS if claim.id in wanted)
