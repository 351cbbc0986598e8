"""Checkpoints: whole or passed over, whatever happened to their bytes."""

import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepcontrol.workbench.train import checkpoint as checkpoints
from deepcontrol.workbench.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    load,
    load_last,
    save_best,
    save_last,
)


def some(seed: int) -> Checkpoint:
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


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert load_last(tmp_path, print) is None
    for seed in (1, 2, 3):
        save_last(tmp_path, some(seed))
    assert_same(load(tmp_path / "last"), some(3))
    assert_same(load(tmp_path / "previous"), some(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "previous"]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_100_of_100_damages_are_found(tmp_path: Path) -> None:
    """50 truncations and 50 flipped bits, anywhere in any file."""
    save_last(tmp_path, some(1))
    save_last(tmp_path, some(2))
    rng = random.Random(0)
    for damage in range(100):
        folder = tmp_path / f"damaged{damage}"
        shutil.copytree(tmp_path / "last", folder)
        path = rng.choice(files(folder))
        content = bytearray(path.read_bytes())
        if damage % 2:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        else:
            content = content[: rng.randrange(len(content))]
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=folder.name):
            load(folder)


def test_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    save_last(tmp_path, some(1))
    save_last(tmp_path, some(2))
    model = tmp_path / "last" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    said: list[str] = []
    found = load_last(tmp_path, said.append)
    assert found is not None
    assert_same(found, some(1))
    assert "passed over" in said[0]
    assert "model.safetensors has" in said[0]
    (tmp_path / "previous" / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_last(tmp_path, said.append)


@pytest.mark.parametrize("failing", ["mkdir", "save_file", "torch.save", "write_bytes", "fsync"])
def test_a_full_disk_leaves_the_old_one(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_last(tmp_path, some(1))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    targets = {
        "mkdir": (Path, "mkdir"),
        "save_file": (checkpoints, "save_file"),
        "torch.save": (torch, "save"),
        "write_bytes": (Path, "write_bytes"),
        "fsync": (checkpoints.os, "fsync"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[failing], full)
        with pytest.raises(CheckpointError, match=r"last could not.*No space.*needs about \d"):
            save_last(tmp_path, some(2))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found, some(1))
    save_last(tmp_path, some(3))  # and once there is room, it goes on
    assert_same(load(tmp_path / "last"), some(3))


@pytest.mark.parametrize("room", [0, 500, 1300])
def test_writing_that_fails_at_a_byte(room: int, tmp_path: Path) -> None:
    """For real: a file may grow to so many bytes and no further, as on a disk that is full."""
    save_last(tmp_path, some(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"last could not.*File too large.*about \d"):
            save_last(tmp_path, some(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]  # the room is given back
    assert_same(load(tmp_path / "last"), some(1))


def test_a_torn_one_takes_no_good_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in (1, 2):
        save_last(tmp_path, some(i))
    model = tmp_path / "last" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_last(tmp_path, some(3))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found, some(1))
    save_last(tmp_path, some(4))
    assert_same(load(tmp_path / "previous"), some(1))
    assert_same(load(tmp_path / "last"), some(4))


def test_killed_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_last(tmp_path, some(1))
    save_last(tmp_path, some(2))
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
            save_last(tmp_path, some(3))
    found = load_last(tmp_path, print)
    assert found is not None
    assert_same(found, some(2))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    save_last(tmp_path, some(1))
    folder = tmp_path / "last"
    torch.save({"path": Path("/")}, folder / "state.pt")  # a class that nobody allowed
    content = {n: (folder / n).read_bytes() for n in ("model.safetensors", "state.pt")}
    written = {n: {"bytes": len(c), "sha256": checkpoints._sha256(c)} for n, c in content.items()}
    (folder / "digest.json").write_bytes(checkpoints._digest_text(written))
    with pytest.raises(CheckpointError, match="more than tensors"):
        load(folder)


def test_stopped_between_two_renames_the_best_is_still_there(tmp_path: Path) -> None:
    save_best(tmp_path, some(1))
    (tmp_path / "best").rename(tmp_path / ".best.old")
    assert_same(load(tmp_path / "best"), some(1))
    save_best(tmp_path, some(2))
    assert_same(load(tmp_path / "best"), some(2))
