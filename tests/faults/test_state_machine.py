"""Save, kill, resume and rename in any order: a state machine against the files of a run.

A kill is a fork that ends at a random call of the operating system, with no chance to clean up.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.folders.runfolder import LockLostError, RunInUseError, lock
from deepcontrol.workbench.folders.storage import write_json
from deepcontrol.workbench.train.checkpoint import (
    Checkpoint,
    check_config,
    load,
    load_last,
    save_best,
    save_last,
)

CALLS = ("open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")
CONFIG = {"format": 1, "config": {"seed": 3, "epochs": 9}, "derived": {"classes": ["a"]}}


def checkpoint(epoch: int, config: bytes) -> Checkpoint:
    """Return a checkpoint of which every value follows from its epoch."""
    return Checkpoint({"a": torch.full((5,), float(epoch))}, {"epoch": epoch}, config)


def record(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "val_error": 1 / (1 + epoch)}


def killed_at(number: int, act: Callable[[], None]) -> bool:
    """Run `act` in a fork that ends at its n-th call. Return whether it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    count = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)


class RunFolder(RuleBasedStateMachine):
    """The files of a run, and the epochs that they must hold."""

    def __init__(self) -> None:
        super().__init__()
        # In memory, where syncing costs nothing: a kill ends the process, not the machine.
        self.place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    @initialize()
    def start(self) -> None:
        self.run, self.names = self.place / "run0", 1
        self.run.mkdir()
        write_json(self.run / runfolder.CONFIG, CONFIG, 2)
        self.config = (self.run / runfolder.CONFIG).read_bytes()
        self.saved = -1  # epoch of the last checkpoint that was written in full
        self.position = -1  # epoch of the process that trains
        self.may_be_saved = -1  # a killed process may have written a later one
        self.is_alive = True

    def epoch(self) -> None:
        """One epoch, as a run writes it: the record, then `best`, then `last`."""
        epoch = self.position + 1
        storage.append_record(self.run / runfolder.METRICS, record(epoch))
        if epoch % 2 == 0:
            save_best(self.run, checkpoint(epoch, self.config))
        save_last(self.run, checkpoint(epoch, self.config))

    @precondition(lambda self: self.is_alive)
    @rule()
    def save(self) -> None:
        self.epoch()
        self.position += 1
        self.saved = self.may_be_saved = self.position

    @precondition(lambda self: self.is_alive)
    @rule(call=strategies.integers(1, 90))
    def kill(self, call: int) -> None:
        if killed_at(call, self.epoch):
            self.is_alive = False
        else:
            self.saved = self.position + 1
            self.position += 1
        self.may_be_saved = self.position + 1 if not self.is_alive else self.position

    @precondition(lambda self: not self.is_alive)
    @rule(call=strategies.integers(0, 12))
    def resume(self, call: int) -> None:
        """Resume, and perhaps be killed again meanwhile."""

        def act() -> None:
            found = load_last(self.run, lambda text: None)
            epoch = -1 if found is None else found[1].state["epoch"]
            storage.truncate_records(self.run / runfolder.METRICS, epoch)

        if killed_at(call, act):
            return
        messages: list[str] = []
        found = load_last(self.run, messages.append)
        self.position = -1 if found is None else found[1].state["epoch"]
        assert self.position in (self.saved, self.may_be_saved), messages
        assert messages == []  # a kill damages nothing
        self.saved = self.may_be_saved = self.position
        self.is_alive = True
        rows = storage.read_records(self.run / runfolder.METRICS) if self.position >= 0 else []
        assert rows == [record(epoch) for epoch in range(self.position + 1)]

    @rule()
    def rename(self) -> None:
        moved = self.place / f"run{self.names}"
        self.run.rename(moved)
        self.run, self.names = moved, self.names + 1

    @precondition(lambda self: self.is_alive)
    @rule(kind=strategies.sampled_from(["delete", "move", "second", "nothing"]))
    def hold_lock(self, kind: str) -> None:
        with lock(self.run) as held:
            if kind == "delete":
                (self.run / "lock").unlink()
            elif kind == "move":
                self.rename()
            elif kind == "second":
                with pytest.raises(RunInUseError), lock(self.run):
                    pytest.fail("two processes hold the lock")
            if kind in ("delete", "move"):
                with pytest.raises(LockLostError):
                    held.check()
            else:
                held.check()

    @invariant()
    def every_checkpoint_is_whole(self) -> None:
        """`last` or `previous` can be read at any moment, and `best` if it was ever written."""
        found = load_last(self.run, lambda text: None)
        assert (found is None) <= (self.saved < 0)
        if found is not None:
            name, content = found
            epoch = content.state["epoch"]
            assert epoch in (self.saved, self.may_be_saved)
            assert content.model["a"].tolist() == [float(epoch)] * 5
            check_config(self.run, name, content.config)
        if self.saved >= 0:  # epoch 0 was the first best one
            best = load(self.run / runfolder.BEST)
            assert best.state["epoch"] % 2 == 0
            assert best.state["epoch"] <= self.may_be_saved


@pytest.mark.slow
def test_save_kill_resume_rename_in_any_order() -> None:
    run_state_machine_as_test(
        RunFolder,
        settings=settings(
            max_examples=10,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
