"""Checkpoints: contents, files that survive crashes and damage, the background writer."""

import copy
import json
import math
import os
import random
import resource
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders import storage
from deepcontrol.workbench.optim import adamw, sgd
from deepcontrol.workbench.train import checkpoint as checkpoint_module
from deepcontrol.workbench.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    load,
    load_last,
    save_best,
    save_last,
)
from deepcontrol.workbench.train.config_file import load_config
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.evaluate import MovingAverage
from deepcontrol.workbench.train.snapshot import Position, restore, snapshot
from tests.workbench.train.runs import differences, train_here

SINGLE = Group(torch.device("cpu"))


# Contents


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = sgd(model.parameters(), 0.1, 0.9)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_restore_a_snapshot() -> None:
    model, optimizer = trained()
    position = Position(epoch=2, step=3, images=6, loss_sum=1.5)
    taken = snapshot(model, optimizer, position, SINGLE)
    other, its = trained()
    its.param_groups[0]["lr"] = 0.3
    assert restore(taken, other, its, SINGLE) == position
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], its.state[b]["momentum_buffer"])
    assert its.param_groups[0]["lr"] == 0.3  # from the configuration


def set_in(*keys: Any, value: Any) -> Callable[[dict[Any, Any]], Any]:
    def change(state: dict[Any, Any]) -> Any:
        inner = state
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return state

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda state: [state],
        lambda state: {k: v for k, v in state.items() if k != "rng"},
        lambda state: {k: v for k, v in state.items() if k != "optimizer"},
        set_in("format", value=7),
        set_in("position", "epoch", value="2"),
        set_in("position", "step", value=-1),
        set_in("position", "more", value=1),
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(3)),
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(2, 3).half()),
        set_in("optimizer", 0, "momentum_buffer", value="a"),
        # A fused step would write 6 elements into the memory of each of these:
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(())),
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(1)),
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(2, 3, device="meta")),
        set_in("optimizer", 0, "momentum_buffer", value=torch.zeros(2, 3).to_sparse()),
        set_in("optimizer", 0, "exp_avg", value=torch.zeros(2, 3)),
        set_in("optimizer", 0, "momentum_buffer", value=None),  # parameter 1 has one
        lambda state: {**state, "optimizer": {0: state["optimizer"][0]}},
        set_in("optimizer", 999, value={"momentum_buffer": torch.zeros(3)}),
        set_in("rng", value=[(torch.zeros(3, dtype=torch.uint8), None)]),
        set_in("rng", value=[7]),
        set_in("rng", value=[(torch.zeros(9, dtype=torch.uint8), None)]),
        lambda state: {**state, "rng": [(beyond_its_words(state["rng"][0][0]), None)]},
    ],
)
def test_invalid_contents_are_refused(change: Callable[[Any], Any]) -> None:
    model, optimizer = trained()
    taken = snapshot(model, optimizer, Position(), SINGLE)
    tampered = Checkpoint(taken.model, change(copy.deepcopy(taken.state)))
    with pytest.raises(CheckpointError):
        restore(tampered, model, optimizer, SINGLE)


def beyond_its_words(state: Tensor) -> Tensor:
    """A state that torch accepts, and with which it reads behind the generator's 624 words."""
    state = state.clone()
    state[8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([624]).view(torch.uint8)
    return state


def test_momentum_is_copied_into_memory_of_its_own() -> None:
    """Whatever the strides of the file's tensor, a fused step writes into a dense one."""
    model, optimizer = trained()
    taken = snapshot(model, optimizer, Position(), SINGLE)
    wide = torch.arange(2.0).view(2, 1).expand(2, 3)  # two elements in memory
    taken.state["optimizer"][0]["momentum_buffer"] = wide
    restore(taken, model, optimizer, SINGLE)
    weight = next(model.parameters())
    restored = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(restored, wide)
    assert restored.stride() == weight.stride()
    assert restored.untyped_storage().nbytes() == weight.untyped_storage().nbytes()
    optimizer.step()
    assert wide.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_momentum_has_the_strides_of_a_channels_last_filter() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = sgd(model.parameters(), 0.1, 0.9)
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    taken = snapshot(model, optimizer, Position(), SINGLE)
    before = taken.state["optimizer"][0]["momentum_buffer"]
    taken.state["optimizer"][0]["momentum_buffer"] = before.contiguous()
    restore(taken, model, optimizer, SINGLE)
    restored = optimizer.state[model.weight]["momentum_buffer"]
    assert restored.stride() == model.weight.stride() != before.contiguous().stride()
    assert torch.equal(restored, before)


def test_weights_of_another_dtype_are_refused() -> None:
    model, optimizer = trained()
    taken = snapshot(model, optimizer, Position(), SINGLE)
    other = {name: value.double() for name, value in taken.model.items()}
    with pytest.raises(CheckpointError, match=r"weight: expected shape \(2, 3\) and torch.float32"):
        restore(Checkpoint(other, taken.state), model, optimizer, SINGLE)


def test_links_in_the_place_of_checkpoints_are_removed(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    save_last(tmp_path, example(1))
    (tmp_path / "last").rename(outside)
    for name in ("last", "previous", "best", ".last.new", ".best.old"):
        (run / name).symlink_to(outside)
    save_last(run, example(2))
    save_best(run, example(2))
    assert sorted(p.name for p in run.iterdir()) == ["best", "last", "previous"]
    assert_same(load(run / "last"), example(2))
    assert_same(load(outside), example(1))


def test_run_folder_with_old_key_names_resumes(whole: Path, run: Path) -> None:
    """Older versions wrote "optimiser" in state.pt and "colours" in config.json."""
    train_here(run, epochs=2)
    saved = load(run / "last")
    assert "optimiser" not in saved.state
    state = {"optimiser" if k == "optimizer" else k: v for k, v in saved.state.items()}
    shutil.rmtree(run / "last")
    save_last(run, Checkpoint(saved.model, state))
    content = json.loads((run / "config.json").read_text())
    del content["crc"]
    colors = content["derived"]["colors"]
    content["derived"]["colours"] = content["derived"].pop("colors")
    (run / "config.json").write_text(json.dumps(content))
    assert load_config(run)[1]["colors"] == colors
    train_here(run)
    assert differences(run, whole) == []
    derived = json.loads((run / "config.json").read_text())["derived"]
    assert derived["colors"] == colors
    assert "colours" not in derived


# Files


def example(seed: int) -> Checkpoint:
    rng = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {"a": torch.randn(40, 7, generator=rng), "b": torch.ones(3).half()}
    filters = torch.randn(4, 3, 2, 2, generator=rng)
    weights["filters"] = filters.to(memory_format=torch.channels_last)  # as on a GPU
    return Checkpoint(weights, {"epoch": seed, "rng": torch.arange(50), "best": 0.25})


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.model.keys() == b.model.keys()
    assert all(torch.equal(a.model[k], b.model[k]) for k in a.model)
    assert a.state["epoch"] == b.state["epoch"]
    assert torch.equal(a.state["rng"], b.state["rng"])


def write_digest(folder: Path) -> None:
    """Make the digest of a changed checkpoint right, as an attacker would."""
    files = (p for p in folder.iterdir() if p.name != "digest.json")
    about = {
        p.name: {"bytes": p.stat().st_size, "sha256": checkpoint_module._sha256(p)} for p in files
    }
    (folder / "digest.json").write_bytes(checkpoint_module._digest_text(about))


def damage_model(folder: Path) -> None:
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])


def test_save_and_load(tmp_path: Path) -> None:
    assert load_last(tmp_path, print) is None
    for seed in (1, 2, 3):
        save_last(tmp_path, example(seed))
    assert_same(load(tmp_path / "last"), example(3))
    assert_same(load(tmp_path / "previous"), example(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "previous"]


def test_100_of_100_damages_are_detected(tmp_path: Path) -> None:
    """50 truncations and 50 flipped bits, anywhere in any file."""
    save_last(tmp_path, example(1))
    save_last(tmp_path, example(2))
    rng = random.Random(0)
    for damage in range(100):
        folder = tmp_path / f"damaged{damage}"
        shutil.copytree(tmp_path / "last", folder)
        path = rng.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        if damage % 2:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            content = content[: rng.randrange(len(content))]
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=folder.name):
            load(folder)


def test_damaged_last_is_skipped(tmp_path: Path) -> None:
    save_last(tmp_path, example(1))
    save_last(tmp_path, example(2))
    damage_model(tmp_path / "last")
    lines: list[str] = []
    found = load_last(tmp_path, lines.append)
    assert found is not None
    assert_same(found[1], example(1))
    assert "skipping a damaged checkpoint" in lines[0]
    assert "model.safetensors has" in lines[0]
    (tmp_path / "previous" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_last(tmp_path, lines.append)


@pytest.mark.parametrize("failing", ["mkdir", "write_atomic", "torch.save", "fsync"])
def test_full_disk_leaves_the_old_checkpoint(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_last(tmp_path, example(1))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    targets = {
        "mkdir": (Path, "mkdir"),
        "write_atomic": (checkpoint_module, "write_atomic"),
        "torch.save": (torch, "save"),
        "fsync": (storage.os, "fsync"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[failing], full)
        with pytest.raises(CheckpointError, match=r"cannot write .*last.*No space.*needs about \d"):
            save_last(tmp_path, example(2))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found[1], example(1))
    save_last(tmp_path, example(3))  # works once there is space
    assert_same(load(tmp_path / "last"), example(3))


@pytest.mark.parametrize("limit", [0, 500, 1300])
def test_write_that_fails_at_a_byte(limit: int, tmp_path: Path) -> None:
    """With a real limit on the file size, which acts like a full disk."""
    save_last(tmp_path, example(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*last.*File too large.*about \d"):
            save_last(tmp_path, example(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]  # the space is freed
    assert_same(load(tmp_path / "last"), example(1))


def test_damaged_last_never_replaces_an_intact_previous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in (1, 2):
        save_last(tmp_path, example(i))
    damage_model(tmp_path / "last")

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_last(tmp_path, example(3))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found[1], example(1))
    save_last(tmp_path, example(4))
    assert_same(load(tmp_path / "previous"), example(1))
    assert_same(load(tmp_path / "last"), example(4))


def test_last_survives_a_kill_between_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_last(tmp_path, example(1))
    save_last(tmp_path, example(2))
    renames = []
    rename = Path.rename

    def stop_before_the_second(self: Path, target: Path) -> Path:
        renames.append(target)
        if len(renames) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop_before_the_second)
        with pytest.raises(KeyboardInterrupt):
            save_last(tmp_path, example(3))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found[1], example(2))


def test_best_survives_a_kill_between_the_renames(tmp_path: Path) -> None:
    save_best(tmp_path, example(1))
    (tmp_path / "best").rename(tmp_path / ".best.old")
    assert_same(load(tmp_path / "best"), example(1))
    save_best(tmp_path, example(2))
    assert_same(load(tmp_path / "best"), example(2))


def test_other_classes_are_not_unpickled(tmp_path: Path) -> None:
    save_last(tmp_path, example(1))
    folder = tmp_path / "last"
    torch.save({"path": Path("/")}, folder / "state.pt")  # not on torch's list of safe classes
    write_digest(folder)
    with pytest.raises(CheckpointError, match="more than tensors"):
        load(folder)


# Background writer


def checkpoint(epoch: int) -> Checkpoint:
    return Checkpoint({"epoch": torch.tensor(epoch)}, {"format": 1, "position": {}})


@dataclass
class SlowDisk:
    """Block every write until `go` is set, and fail if `full`."""

    written: list[tuple[str, int]] = field(default_factory=list)
    busy: Event = field(default_factory=Event)
    go: Event = field(default_factory=Event)
    full: bool = False

    def write(self, name: str, saved: Checkpoint) -> None:
        self.busy.set()
        assert self.go.wait(60)
        if self.full:
            raise CheckpointError("no space")
        self.written.append((name, int(saved.model["epoch"])))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(
        checkpoint_module, "save_last", lambda run, a, last_is_intact: disk.write("last", a)
    )
    monkeypatch.setattr(checkpoint_module, "save_best", lambda run, a: disk.write("best", a))
    return disk


def test_training_does_not_wait_for_the_disk(disk: SlowDisk, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(checkpoint(1))
    assert disk.busy.wait(60)
    for epoch, is_best in ((2, True), (3, True), (4, False), (5, False)):
        writer.save(checkpoint(epoch), is_best)
    assert not disk.written
    disk.go.set()
    writer.wait()
    assert disk.written == [("last", 1), ("best", 3), ("last", 5)]
    writer.save(checkpoint(6), is_best=True)
    writer.wait()
    assert disk.written[3:] == [("best", 6), ("last", 6)]
    writer.close()


def test_write_error_is_raised_once(disk: SlowDisk, tmp_path: Path) -> None:
    writer, disk.full = CheckpointWriter(tmp_path), True
    writer.save(checkpoint(1))
    assert disk.busy.wait(60)
    writer.save(checkpoint(2))  # dropped by the error
    disk.go.set()
    with pytest.raises(CheckpointError, match="no space"):
        writer.wait()
    disk.full = False
    writer.save(checkpoint(3))
    writer.wait()
    assert disk.written == [("last", 3)]
    writer.close()


def reseal(folder: Path) -> None:
    """Write the digests of the files as they are."""
    names = ("model.safetensors", "state.pt")
    files = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": checkpoint_module._sha256(folder / name),
        }
        for name in names
    }
    (folder / "digest.json").write_bytes(checkpoint_module._digest_text(files))


def test_compressed_state_is_refused(tmp_path: Path) -> None:
    """A small file could otherwise inflate to more than the memory."""
    save_last(tmp_path, Checkpoint({"a": torch.zeros(2)}, {"b": torch.zeros(1000)}))
    path = tmp_path / "last" / "state.pt"
    with zipfile.ZipFile(path) as file:
        content = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            file.writestr(name, data)
    reseal(tmp_path / "last")
    with pytest.raises(CheckpointError, match=r"in state\.pt is compressed"):
        load(tmp_path / "last")


def test_states_that_no_reader_expects_are_refused(tmp_path: Path) -> None:
    """Readers raise KeyError, IndexError, AssertionError and others."""
    save_last(tmp_path, Checkpoint({"a": torch.zeros(2)}, {"b": torch.zeros(3)}))
    last, rng = tmp_path / "last", random.Random(0)
    with zipfile.ZipFile(last / "state.pt") as file:
        content = {name: file.read(name) for name in file.namelist()}
    (program,) = (name for name in content if name.endswith("data.pkl"))
    refused = 0
    for _ in range(150):
        damaged = bytearray(content[program])
        at = rng.randrange(len(damaged))
        damaged[at : at + rng.randrange(4)] = rng.choice([b"R", b"Q", b"0", b"t", b"h\x63", b"."])
        with zipfile.ZipFile(last / "state.pt", "w") as file:
            for name, data in content.items():
                file.writestr(name, bytes(damaged) if name == program else data)
        reseal(last)
        try:
            load(last)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_unknown_dtype_of_a_weight_is_refused(tmp_path: Path) -> None:
    save_last(tmp_path, Checkpoint({"a": torch.zeros(2)}, {}))
    path = tmp_path / "last" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"C64"'))
    reseal(tmp_path / "last")
    with pytest.raises(CheckpointError):
        load(tmp_path / "last")


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_step_of_adamw_must_be_a_count(value: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = adamw(model.parameters(), 0.1, on_gpu=False)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    taken = snapshot(model, optimizer, Position(), SINGLE)
    restore(taken, model, optimizer, SINGLE)
    taken.state["optimizer"][0]["step"].fill_(value)
    with pytest.raises(CheckpointError, match="step of parameter 0 cannot be"):
        restore(taken, model, optimizer, SINGLE)


@pytest.mark.parametrize(
    "state",
    [
        {"weights": {1: torch.zeros(1), "x": 2}, "steps": torch.zeros((), dtype=torch.double)},
        {"weights": {}, "steps": torch.zeros((), dtype=torch.double, device="meta")},
        {"weights": {}, "steps": torch.zeros((), dtype=torch.complex64)},
    ],
)
def test_invalid_moving_average_is_refused(state: dict[str, Any]) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError):
        MovingAverage(model, optimizer, 0.9).restore(state)


def test_images_that_do_not_match_the_steps_are_refused(
    whole: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean over no image would divide by zero."""
    shutil.copytree(whole, run)
    kept = load(run / "last")
    kept.state["position"] |= {"epoch": 2, "step": 4, "images": 0}
    save_last(run, kept)
    assert main(["train", "--out", str(run)]) == 1
    assert "has seen 0 images in 4 steps, expected 7" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fifo", "file"])
def test_special_files_in_the_place_of_checkpoints_are_replaced(kind: str, tmp_path: Path) -> None:
    for name in (".last.new", "last", "previous", ".best.old", "best"):
        os.mkfifo(tmp_path / name) if kind == "fifo" else (tmp_path / name).touch()
    save_last(tmp_path, Checkpoint({"a": torch.zeros(2)}, {}))
    save_best(tmp_path, Checkpoint({"a": torch.zeros(2)}, {}))
    assert load_last(tmp_path, print) is not None
    assert load(tmp_path / "best").model["a"].numel() == 2
