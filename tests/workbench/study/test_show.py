"""What a study shows, in a terminal and in a log."""

import io
from pathlib import Path

from rich.console import Console

from deepcontrol.workbench.study.claims import CLAIMS, judge
from deepcontrol.workbench.study.jobs import Progress, plan
from deepcontrol.workbench.study.presets import PRESETS
from deepcontrol.workbench.study.queue import Queue, State
from deepcontrol.workbench.study.rules import Evidence
from deepcontrol.workbench.study.settings import Reproduce
from deepcontrol.workbench.study.show import Show, table_of_verdicts

STATES: tuple[State, ...] = ("done", "diverged", "running", "waiting", "failed")


def queue(out: Path) -> Queue:
    asked = Reproduce(out=out)
    made = Queue(plan(asked.claims, asked.protocol, out, None)[: len(STATES)], out)
    for entry, state in zip(made.entries.values(), STATES, strict=True):
        entry.state, entry.where, entry.progress = state, "gpu 1", Progress(7, 0.125, None)
        entry.fault = "exit code 1: out of [memory]" if state == "failed" else ""
    return made


def shown(out: Path, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, height=40)
    with Show(console) as show:
        made = queue(out)
        for entry in made.entries.values():
            show.say(entry, entry.state)
        show.look(made)
    return file.getvalue()


def test_a_terminal_has_a_table_of_all_runs(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=True)
    assert "2 of 5 runs are done" in text
    assert "running, gpu 1" in text
    assert text.rindex("running, gpu 1") > text.index("failed")  # what went wrong comes first
    assert f"7/{PRESETS['quick'].epochs}" in text
    assert "12.50" in text


def test_a_terminal_has_a_line_for_what_is_tried_once_more(tmp_path: Path) -> None:
    file = io.StringIO()
    show = Show(Console(file=file, force_terminal=True, width=200))
    (entry,) = queue(tmp_path).having("waiting")
    show.say(entry, "started on gpu 1")
    assert file.getvalue() == ""  # the table has that
    entry.fault = "exit code -9: killed"
    show.say(entry, f"failed, {entry.fault}; it is tried once more")
    assert "killed; it is tried once more" in file.getvalue()


def test_a_log_has_a_line_for_each_change(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False).splitlines()
    assert len(lines) == len(STATES)
    assert lines[0] == "0:00  segnet-agc-b1-lr0.08-s0: done (epoch 7, error 12.50%)"


def test_verdicts_fit_a_log() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140)
    console.print(table_of_verdicts([judge(claim, Evidence()) for claim in CLAIMS]))
    for claim in CLAIMS:
        assert claim.id in file.getvalue()
    assert "the benchmark's file has no such rows" in file.getvalue()  # where no value is
