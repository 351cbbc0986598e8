"""Faults of run and study folders: damage, hostile content, links, full disks, moved folders."""

import copy
import hashlib
import json
import math
import os
import random
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
from torch import nn

from deepcontrol.workbench.folders import runfolder, storage
from deepcontrol.workbench.folders.runfolder import LockLostError, RunInUseError, lock
from deepcontrol.workbench.folders.storage import add_checksum, parse_json, write_json
from deepcontrol.workbench.folders.studyfolder import read_study
from deepcontrol.workbench.optim import sgd
from deepcontrol.workbench.report.page import write_page
from deepcontrol.workbench.train.checkpoint import (
    DIGEST,
    MODEL,
    STATE,
    Checkpoint,
    CheckpointError,
    check_config,
    load,
    load_last,
    save_best,
    save_last,
)
from deepcontrol.workbench.train.config_file import load_config, to_json
from deepcontrol.workbench.train.distributed import Group
from deepcontrol.workbench.train.snapshot import BUFFER, Position, restore, snapshot
from tests.workbench.train.runs import tiny

Result = Literal["detected", "harmless"]
Attempt = Callable[[random.Random, Path], Result]
ROOT = Path(__file__).parents[2]
SINGLE = Group(torch.device("cpu"))
CONFIG = {
    "format": 1,
    "config": {"seed": 3, "momentum": 0.9, "val_limit": 16, "epochs": 150},
    "derived": {"classes": ["sky", "car"], "colors": [[1, 2, 3], [4, 5, 6]]},
}


# The folder under attack


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    optimizer = sgd(model.parameters(), 0.1, 0.9)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def make_run(run: Path) -> None:
    """Write a run folder with all its files, of two checkpoints and three epochs."""
    run.mkdir()
    write_json(run / runfolder.CONFIG, CONFIG, 2)
    config = (run / runfolder.CONFIG).read_bytes()
    for epoch in (1, 2):
        taken = snapshot(*trained(epoch), Position(epoch=epoch), SINGLE)
        save_last(run, Checkpoint(taken.model, taken.state, config))
    save_best(run, Checkpoint(taken.model, {}, config))
    for epoch in range(3):
        error = 0.5 / (1 + epoch)
        storage.append_record(run / runfolder.METRICS, {"epoch": epoch, "val_error": error})
        layers = {"a": {"mean_scale": {"mean": error, "min": 0.0, "max": 1.0}}}
        storage.append_record(run / runfolder.LAYERS, {"epoch": epoch, "layers": layers})
    runfolder.write_diverged(run, 2, 17, "the loss is not finite")


def state_of(run: Path) -> tuple[list[str], dict[str, Any]]:
    """Read a run as the commands do. Return the complaints, and the values that were read."""
    said: list[str] = []
    values: dict[str, Any] = {}
    try:
        content = runfolder.read_run(run)
        said += content.notes
        values |= {"config": content.config, "derived": content.derived}
        values |= {"metrics": content.metrics, "layers": content.layers}
        values |= {"diverged": content.diverged}
    except ValueError as error:
        said.append(str(error))
    try:
        found = load_last(run, said.append)
        if found is None:
            said.append("no checkpoint")
        else:
            check_config(run, found[0], found[1].config)
            model, optimizer = trained(0)
            position = restore(found[1], model, optimizer, SINGLE)
            values[f"epoch {position.epoch}"] = [p.tolist() for p in model.parameters()]
            said += resumed_records(run, position.epoch)
    except (CheckpointError, ValueError) as error:
        said.append(str(error))
    return said, values


def resumed_records(run: Path, epoch: int) -> list[str]:
    """Return the messages about the records when a run resumes, from copies of them."""
    said = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (runfolder.METRICS, runfolder.LAYERS):
            copied = Path(folder) / name
            copied.write_bytes((run / name).read_bytes())
            said += storage.truncate_records(copied, epoch)
    return said


def compare(run: Path, before: dict[str, Any]) -> Result:
    """Raise AssertionError if a value has changed and nothing was said."""
    said, values = state_of(run)
    if said:
        for name, value in values.items():  # what is left is right, or a part of it is missing
            if name in ("config", "derived") or name.startswith("epoch"):
                assert before.get(name, value) == value, f"{name} changed; said {said}"
        return "detected"
    assert values == before, "a value changed in silence"
    return "harmless"


# Faults


def damage_file(change: Callable[[random.Random, bytes], bytes]) -> Attempt:
    """Damage a random file of the run."""

    def attempt(rng: random.Random, folder: Path) -> Result:
        run = folder / "run"
        before = state_of(run)[1]
        unread = {runfolder.PREVIOUS, runfolder.BEST}
        files = [p for p in sorted(run.rglob("*")) if p.is_file() and not unread & {*p.parts}]
        path = rng.choice(files)
        content = path.read_bytes()
        path.write_bytes(change(rng, content))
        try:
            return compare(run, before)
        except AssertionError as error:
            raise AssertionError(f"{path.relative_to(run)}: {error}") from None
        finally:
            path.write_bytes(content)

    return attempt


def flip(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def tear(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def zero_block(rng: random.Random, content: bytes) -> bytes:
    """As a lost sector, or a file that was extended and not written."""
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randrange(1, 513))
    return content[:start] + bytes(end - start) + content[end:]


def hostile_state(rng: random.Random, folder: Path) -> Result:
    """A state.pt that was made to harm, with a right digest."""
    model, optimizer = trained(rng.randrange(100))
    taken = snapshot(model, optimizer, Position(), SINGLE)
    state = copy.deepcopy(taken.state)
    size = rng.choice([(), (1,), (8,), (64,), (8, 8), (8, 8, 1), (0,), (8, 9)])
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.int64, torch.bool])
    tensor: Any = torch.zeros(size, dtype=dtype)
    if rng.random() < 0.3:
        tensor = torch.zeros(1, dtype=dtype).expand(size) if size else tensor
    if rng.random() < 0.1:
        tensor = rng.choice([tensor.to_sparse(), tensor.to("meta"), "x", 7, [1.0]])
    where = rng.choice(["momentum", "rng", "position", "index"])
    if where == "momentum":
        state["optimizer"][rng.randrange(2)][rng.choice([BUFFER, BUFFER, "other"])] = tensor
    elif where == "rng":
        words = state["rng"][0][0].clone()
        for at in rng.sample(range(24), 4):
            words[at] = rng.randrange(256)
        state["rng"] = [(rng.choice([tensor, words]), None)]
    elif where == "position":
        value = rng.choice([-5, "1", None, 1.5, math.nan, tensor, True])
        state["position"][rng.choice(list(state["position"]))] = value
    else:
        state["optimizer"][rng.choice([-1, 99, "0", None])] = {BUFFER: tensor}
    before = torch.get_rng_state()
    try:
        restore(Checkpoint(taken.model, state), model, optimizer, SINGLE)
    except CheckpointError:
        return "detected"
    finally:
        torch.rand(700)  # draws all words of an accepted generator
        torch.set_rng_state(before)
    for p in model.parameters():
        buffer = optimizer.state[p][BUFFER]
        assert buffer.shape == p.shape
        assert buffer.dtype == p.dtype
        assert buffer.untyped_storage().nbytes() >= p.numel() * p.element_size()
    optimizer.step()
    return "harmless"


def hostile_pickle(rng: random.Random, folder: Path) -> Result:
    """A checkpoint of which a program or a header was changed, with right digests."""
    run = folder / "pickle"
    if not run.exists():
        make_run(run)
    kept = {path: path.read_bytes() for path in (run / runfolder.LAST).iterdir()}
    state, weights = run / runfolder.LAST / STATE, run / runfolder.LAST / MODEL
    if rng.random() < 0.3:
        header = bytearray(kept[weights])
        header[rng.randrange(min(300, len(header)))] = rng.choice(b'"{}[],:0F\x00\xff')
        weights.write_bytes(header)
    else:
        _change_pickle(rng, state)
    reseal(run / runfolder.LAST)
    model, optimizer = trained(0)
    try:
        restore(load(run / runfolder.LAST), model, optimizer, SINGLE)
    except CheckpointError:
        return "detected"
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    optimizer.step()
    return "harmless"  # a number was changed, or a name that nothing reads


def _change_pickle(rng: random.Random, state: Path) -> None:
    with zipfile.ZipFile(state) as file:
        content = {name: file.read(name) for name in file.namelist()}
    (program,) = (name for name in content if name.endswith("data.pkl"))
    damaged = bytearray(content[program])
    for _ in range(rng.randrange(1, 5)):
        at, opcodes = (
            rng.randrange(len(damaged)),
            (b"R", b"Q", b"b", b"0", b"t", b"h\x63", b"J~~~~"),
        )
        damaged[at : at + rng.randrange(4)] = rng.choice(opcodes)
    compression = rng.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(state, "w", compression) as file:
        for name, data in content.items():
            file.writestr(name, bytes(damaged) if name == program else data)


def reseal(folder: Path) -> None:
    """Write the digests of a checkpoint's files as they are."""
    names = [MODEL, STATE, runfolder.CONFIG]
    files = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in names
    }
    (folder / DIGEST).write_text(json.dumps(files, indent=2) + "\n")


def hostile_values(rng: random.Random, folder: Path) -> Result:
    """Values of other types and sizes in a JSON file, with a right checksum."""
    run = folder / "values"
    if not run.exists():
        make_run(run)
        content = {**CONFIG, "config": to_json(tiny())}
        write_json(run / runfolder.CONFIG, content, 2)
        config = (run / runfolder.CONFIG).read_bytes()
        (run / runfolder.LAST / runfolder.CONFIG).write_bytes(config)
    names = (runfolder.CONFIG, runfolder.METRICS, runfolder.LAYERS, runfolder.DIVERGED)
    path = run / rng.choice(names)
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = rng.randrange(len(lines))
    row = json.loads(lines[at])
    del row["crc"]
    _replace_value(rng, row)
    lines[at] = add_checksum(json.dumps({"kept": 0, **row}))
    path.write_text("\n".join([*lines, ""]))
    try:
        found = runfolder.read_run(run)
        if rng.random() < 0.02:  # a page takes a second
            page = write_page([found], [], folder / "page").read_text()
            assert "<script>alert" not in page
        load_config(run)
        check_config(run, runfolder.LAST, (run / runfolder.LAST / runfolder.CONFIG).read_bytes())
        if found.notes:
            return "detected"
    except (ValueError, OSError):
        return "detected"
    finally:
        path.write_text(text)
    return "harmless"  # nothing depends on the value, or it is as good as any other


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63 - 1, 1e100, -1e-300, "", "x" * 5000, "\x1b[2J", "\ud800",
    "<script>alert(1)</script>", [], {}, [[]], [None], {"a": {}}, [256, 0, 0], "os:system",
    [2**40, 2**40],
)  # fmt: skip


def _replace_value(rng: random.Random, row: dict[str, Any]) -> None:
    """Replace, remove or add a value at a random depth."""
    inner: Any = row
    while True:
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or rng.random() < 0.3:
            break
        inner = inner[key]
    if isinstance(inner, dict) and rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = copy.deepcopy(rng.choice(VALUES))


def hostile_json(rng: random.Random, folder: Path) -> Result:
    """Numbers, nesting and sizes that later arithmetic cannot take."""
    number = rng.choice(["1e400", "-1e999", "9" * rng.randrange(20, 6000), "NaN", "-Infinity", "1"])
    depth = rng.choice([1, 10, 63, 70, 1000, 100_000])
    text = "[" * depth + number + "]" * rng.choice([depth, depth, depth - 1])
    try:
        value = parse_json(text)
    except ValueError:
        return "detected"
    for _ in range(depth):
        (value,) = value
    assert value == 1
    return "harmless"


def hostile_link(rng: random.Random, folder: Path) -> Result:
    """A link at the place of an output, or of a folder on the way to it."""
    outside, study = folder / "outside", folder / "study"
    parts = rng.choice([("index.html",), ("figures", "figure1.png"), ("a", "b", "c.txt")])
    path = study.joinpath(*parts)
    link = study.joinpath(*parts[: rng.randrange(1, len(parts) + 1)])
    link.parent.mkdir(parents=True, exist_ok=True)
    target = rng.choice([outside, outside / "precious", outside / "missing", link])
    link.symlink_to(target)
    before = {p: p.read_bytes() for p in outside.iterdir()}
    writers: list[Callable[[], object]] = [
        lambda: storage.write_atomic(path, "new", inside=study),
        lambda: storage.open_append(path, inside=study).write("new"),
        lambda: storage.make_folder(path, inside=study),
        lambda: storage.check_writable(path, inside=study),
    ]
    try:
        rng.choice(writers)()
    except OSError:
        return "detected"
    finally:
        storage.remove_tree(study)
        assert {p: p.read_bytes() for p in outside.iterdir()} == before
    raise AssertionError(f"wrote through {link.name} -> {target.name}")


@contextmanager
def failing_call(name: str, number: int) -> Iterator[None]:
    """Let the n-th call of a function of `os` fail, as on a full disk."""
    original, calls = getattr(os, name), Counter[str]()

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        if calls[name] == number:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    with patch.object(os, name, call):
        yield


def full_disk(rng: random.Random, folder: Path) -> Result:
    """A write that fails at any moment leaves the old files or the new ones."""
    run = folder / "full"
    if not run.exists():
        make_run(run)
    epoch = 1 + max(line["epoch"] for line in storage.read_records(run / runfolder.METRICS))
    taken = snapshot(*trained(epoch), Position(epoch=epoch), SINGLE)
    config = (run / runfolder.CONFIG).read_bytes()
    name, number = rng.choice(["fsync", "replace", "open"]), rng.randrange(1, 30)
    said, result = "cannot write", cast(Result, "harmless")
    try:
        with failing_call(name, number):
            write_json(run / runfolder.CONFIG, CONFIG, 2)
            storage.append_record(run / runfolder.METRICS, {"epoch": epoch, "val_error": 0.5})
            save_last(run, Checkpoint(taken.model, taken.state, config))
    except OSError as error:
        said, result = str(error), "detected"
    assert "cannot write" in said, said
    found = load_last(run, lambda text: None)
    assert found is not None
    position = found[1].state["position"]["epoch"]
    assert position in (epoch - 1, epoch)
    assert runfolder.read_config(run)["config"] == CONFIG["config"]
    storage.truncate_records(run / runfolder.METRICS, epoch)
    if position != epoch or storage.last_epoch(run / runfolder.METRICS) != epoch:
        storage.truncate_records(run / runfolder.METRICS, epoch - 1)
        storage.append_record(run / runfolder.METRICS, {"epoch": epoch, "val_error": 0.5})
        save_last(run, Checkpoint(taken.model, taken.state, config))
    assert not list(run.glob(".*.new"))
    return result


def moved_folder(rng: random.Random, folder: Path) -> Result:
    """A lock that is deleted, or a folder that is moved, while the lock is held."""
    run, moved = folder / "held", folder / "moved"
    kind = rng.choice(["nothing", "delete", "move", "replace", "second"])
    with lock(run) as held:
        if kind == "delete":
            (run / "lock").unlink()
        elif kind in ("move", "replace"):
            run.rename(moved)
            if kind == "replace":
                run.mkdir()
                (run / "lock").touch()
        try:
            if kind == "second":
                with lock(run):
                    raise AssertionError("two processes hold the lock")
            held.check()
        except (LockLostError, RunInUseError):
            return "detected"
        finally:
            for place in (run, moved):
                storage.remove_tree(place)
    assert kind == "nothing", f"{kind} was not noticed"
    return "harmless"


def damaged_study(rng: random.Random, folder: Path) -> Result:
    """A flipped, torn or zeroed study.json."""
    path = folder / "study.json"
    if not path.exists():
        path.write_bytes((ROOT / "results" / "camvid" / "study.json").read_bytes())
    content, before = path.read_bytes(), read_study(folder)
    path.write_bytes(rng.choice([flip, tear, zero_block])(rng, content))
    try:
        found = read_study(folder)
    except ValueError:
        return "detected"
    finally:
        path.write_bytes(content)
    assert found == before, "a value changed in silence"
    return "harmless"


CLASSES: dict[str, Attempt] = {
    "flipped bit in a file of a run": damage_file(flip),
    "torn file of a run": damage_file(tear),
    "zeroed block in a file of a run": damage_file(zero_block),
    "damaged study.json": damaged_study,
    "hostile state.pt with a right digest": hostile_state,
    "hostile pickle or header with right digests": hostile_pickle,
    "values of other types with right checksums": hostile_values,
    "hostile JSON": hostile_json,
    "link in the place of an output": hostile_link,
    "full disk at any call": full_disk,
    "lock deleted, folder moved, second process": moved_folder,
}
