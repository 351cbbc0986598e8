"""Lock files: every package is pinned, with hashes that pip checks."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "locks").glob("*.lock"))


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """The script dev/lock.py."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / "dev" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_locks_are_found() -> None:
    names = {path.stem for path in LOCKS}
    assert names == {"audit", "dev", "docs", "ray", "torch", "zoo", "zoo-more"}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_line_is_a_pin_or_a_hash(path: Path, lock: ModuleType) -> None:
    pins = lock.read_lock(path.read_text().splitlines())
    for line in path.read_text().splitlines():
        assert re.fullmatch(
            r"#.*|[A-Za-z0-9._-]+==[^\s+]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line
        ), line
    assert all(pins.values()), "a package without a hash"
    assert path.read_text() == lock.format_lock(pins)


def test_environments_that_are_used_together_agree(lock: ModuleType) -> None:
    pins, of_ray, of_zoo, more, torch = (
        dict(pin.split("==") for pin in lock.read_lock(path.read_text().splitlines()))
        for path in (
            ROOT / "locks" / f"{name}.lock" for name in ("dev", "ray", "zoo", "zoo-more", "torch")
        )
    )
    for name in pins.keys() & of_ray.keys():
        assert pins[name] == of_ray[name], name
    assert pins["torch"] == of_zoo["torch"] == torch["torch"]
    assert "ray" in of_ray
    # Both are on the path: a package of both would hide one of another version.
    assert not of_zoo.keys() & more.keys()


@pytest.mark.parametrize("target", ["setup", "docs", "test-zoo", "zoo", "test-ray", "audit"])
def test_make_installs_with_hashes_only(target: str) -> None:
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    installs = [line for line in commands if "pip install" in line or "lock.py install" in line]
    assert installs
    for line in installs:
        assert "lock.py install" in line or "--require-hashes" in line or "-e ." in line, line


def test_a_pin_without_a_file_is_named(lock: ModuleType) -> None:
    with pytest.raises(ValueError, match="gone==1: no index"):
        lock.format_lock({"here==1": ["0" * 64], "gone==1": []})


@pytest.mark.parametrize("build", ["cpu", "cuda", "unknown"])
def test_torch_is_installed_if_its_build_is_listed(
    build: str, lock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is allowed the build that it would choose here; an unknown one is refused."""
    hashes = {"cpu": "a" * 64, "cuda": "b" * 64, "unknown": "c" * 64}
    pins = {"numpy==2": ["d" * 64], "torch==2": [hashes["cpu"]]}
    (tmp_path / "dev.lock").write_text(lock.format_lock(pins))
    (tmp_path / lock.TORCH).write_text(lock.format_lock({"torch==2": [hashes["cuda"]]}))
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if "--report" in command:
            about = {"name": "torch", "version": "2+cpu"}
            file = {"archive_info": {"hashes": {"sha256": hashes[build]}}}
            report = {"install": [{"metadata": about, "download_info": file}]}
            Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
        elif "-r" in command:
            allowed = Path(command[command.index("-r") + 1]).read_text().splitlines()
            assert lock.read_lock(allowed)["torch==2"] == [hashes[build]]
            assert "--require-hashes" in command
            calls.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    if build == "unknown":
        with pytest.raises(SystemExit, match=f"{hashes[build]}, which neither"):
            lock.install(tmp_path / "dev.lock")
        assert not calls
    else:
        lock.install(tmp_path / "dev.lock")
        assert len(calls) == 1
