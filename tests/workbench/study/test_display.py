"""Output of a study in a terminal and in a log."""

import io
from pathlib import Path

from rich.console import Console

from deepcontrol.workbench.folders.studyfolder import State
from deepcontrol.workbench.study.claims import CLAIMS, judge
from deepcontrol.workbench.study.command import Display, verdict_table
from deepcontrol.workbench.study.jobs import Progress, Queue, plan
from deepcontrol.workbench.study.rules import Evidence
from deepcontrol.workbench.study.settings import PRESETS, Reproduce

STATES: tuple[State, ...] = ("done", "diverged", "running", "waiting", "failed")


def queue(out: Path) -> Queue:
    asked = Reproduce(out=out)
    made = Queue(plan(asked.claims, asked.effective_preset, out, None)[: len(STATES)], out)
    for entry, state in zip(made.entries.values(), STATES, strict=True):
        entry.state, entry.where, entry.progress = state, "gpu 1", Progress(7, 0.125, None)
        entry.fault = "exit code 1: out of [memory]" if state == "failed" else ""
    return made


def shown(out: Path, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, height=40)
    with Display(console) as display:
        made = queue(out)
        for entry in made.entries.values():
            display.log(entry, entry.state)
        display.update(made)
    return file.getvalue()


def test_a_terminal_shows_a_table_of_all_runs(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True)
    assert "2 of 5 runs finished" in text
    assert "running, gpu 1" in text
    assert text.rindex("running, gpu 1") > text.index("failed")  # failures come first
    assert f"7/{PRESETS['quick'].epochs}" in text
    assert "12.50" in text


def test_a_terminal_prints_a_line_for_each_retry(tmp_path: Path) -> None:
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=True, width=200))
    (entry,) = queue(tmp_path).in_state("waiting")
    display.log(entry, "started on gpu 1")
    assert file.getvalue() == ""  # the table shows it
    entry.fault = "exit code -9: killed"
    display.log(entry, f"failed, {entry.fault}; retrying once")
    assert "killed; retrying once" in file.getvalue()


def test_a_log_has_one_line_per_change(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False).splitlines()
    assert len(lines) == len(STATES)
    assert lines[0] == "0:00  segnet-agc-b1-lr0.08-s0: done (epoch 7, error 12.50%)"


def test_verdicts_fit_a_log() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140)
    console.print(verdict_table(tuple(judge(claim, Evidence()) for claim in CLAIMS)))
    for claim in CLAIMS:
        assert claim.id in file.getvalue()
    assert "the benchmark file has no such rows" in file.getvalue()  # instead of a value
