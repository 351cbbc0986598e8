"""study.json: all that the page needs to know of a study beside its runs, as plain data."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..runfolder import write_atomic
from .arms import Arm, agc, bn
from .claims import CLASSNET_AGC, CLASSNET_BN, Judged
from .figure import FIGURE_1, FIGURE_2, Panel
from .grid import Cell
from .jobs import Job, command, from_nowhere
from .presets import PRESETS, Preset
from .queue import Queue

FORMAT = 1
STUDY = "study.json"
PICTURED = (agc(1), bn(1), agc(4), bn(4), CLASSNET_AGC, CLASSNET_BN)  # whose pictures are shown


def claims_before(out: Path, protocol: Preset) -> set[str]:
    """The ids of the claims that a folder's study is about, none if there is no study yet.

    ValueError if it is one of another kind: their runs must not mix.
    """
    try:
        content = json.loads((out / STUDY).read_text())
        before, ids = dict(content["protocol"]), {str(claim["id"]) for claim in content["claims"]}
    except FileNotFoundError:
        return set()
    except NotADirectoryError:
        raise ValueError(f"{out} is no folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out / STUDY} cannot be read: {error!r}. It can be made anew of the runs, if it is "
            "removed."
        ) from None
    now = described(protocol)
    differences = [f"{k} {before.get(k)} -> {v}" for k, v in now.items() if before.get(k) != v]
    if differences:
        raise ValueError(
            f"{out} holds another study: {', '.join(differences)}. Choose another folder."
        )
    return ids


def described(protocol: Preset) -> dict[str, Any]:
    """What must not change within a study. Seeds and claims may be added, and no number depends on
    how often a run is saved."""
    values = asdict(protocol)
    for name in ("seeds", "close", "seeds_if_close", "claims", "save_epochs", "note"):
        del values[name]
    return json.loads(json.dumps(values))


def write(
    out: Path,
    protocol: Preset,
    words: str,
    queue: Queue,
    judged: Sequence[Judged],
    cells: Sequence[Cell],
) -> None:
    """Written whole, whenever a run ends and after every call, finished or not."""
    jobs = [entry.job for entry in queue.entries.values()]
    drawn, pictured = shown_runs(jobs, protocol)
    content = {
        "format": FORMAT,
        "protocol": described(protocol),
        "preset_epochs": PRESETS[protocol.name].epochs,
        "seeds": 1 + max((job.seed for job in jobs), default=0),
        "note": protocol.note,
        "command": words,
        "claims": [claim_as_data(each, jobs) for each in judged],
        "grid": [asdict(cell) for cell in cells],
        "panels": [panel_as_data(panel, jobs, protocol.rates_times) for panel in FIGURE_1],
        "beside": panels_beside(jobs, protocol.rates_times),
        "runs": [
            {
                "name": entry.job.name,
                "label": f"{entry.job.arm}, seed {entry.job.seed}",
                "state": entry.state,
                "fault": entry.fault,
                "diverged": entry.progress.diverged,
                "command": shlex.join(command(from_nowhere(entry.job.config))),
            }
            for entry in queue.entries.values()
        ],
        "samples": pictured,
        "layers": drawn,
    }
    write_atomic(out / STUDY, json.dumps(content, indent=1) + "\n")


def shown_runs(jobs: Sequence[Job], protocol: Preset) -> tuple[str | None, list[str]]:
    """The run whose lambda is drawn, and those whose pictures are shown."""

    def first_seed(arm: Arm) -> list[str]:
        wanted = arm.at_rate_times(protocol.rates_times)
        return [job.name for job in jobs if job.seed == 0 and job.arm == wanted]

    pictured = [name for arm in PICTURED for name in first_seed(arm)]
    return next(iter(first_seed(agc(4))), None), pictured


def claim_as_data(judged: Judged, jobs: Sequence[Job]) -> dict[str, Any]:
    claim = judged.claim
    return {
        "id": claim.id,
        "says": claim.says,
        "paper": claim.paper,
        "ours": list(judged.ours),
        "verdict": judged.verdict,
        "checks": [asdict(finding) for finding in judged.findings],
        "runs": [job.name for job in jobs if job.arm in claim.arms],
    }


def panel_as_data(panel: Panel, jobs: Sequence[Job], times: float) -> dict[str, Any]:
    arms = [arm.at_rate_times(times) for arm in panel.lines]
    return {
        "letter": panel.letter,
        "title": panel.title,
        "metric": panel.metric,
        "lines": [
            {"label": panel.label(arm), "runs": [job.name for job in jobs if job.arm == arm]}
            for arm in arms
        ],
    }


def panels_beside(jobs: Sequence[Job], times: float) -> list[dict[str, Any]]:
    """Figure 2, as far as this study has something to compare that figure 1 does not."""
    trained = {job.arm for job in jobs}
    in_figure_1 = {arm for panel in FIGURE_1 for arm in panel.lines}
    panels = []
    for panel in FIGURE_2:
        lines = tuple(arm for arm in panel.lines if arm.at_rate_times(times) in trained)
        if len(lines) > 1 and (lines == panel.lines or not in_figure_1.issuperset(lines)):
            panels.append(panel_as_data(replace(panel, lines=lines), jobs, times))
    return panels
