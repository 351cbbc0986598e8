"""The wheel and the source distribution: their content, and an import with only torch installed."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.torch_only import assert_library_trains, link_torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

pytest.importorskip("hatchling", reason="hatchling builds the distributions")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both distributions, without a network, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_wheel_holds_both_packages_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".html", ".typed", ".cpp", ".h")
    expected = {
        str(path.relative_to(SOURCE))
        for top in ("deepcontrol", "streets")
        for path in (SOURCE / top).rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    assert any(name.endswith(".html") for name in expected), "no page templates in src/"
    assert expected <= names, expected - names
    others = {name for name in names - expected if ".dist-info/" not in name}
    assert not others, others


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = email.message_from_string(archive.read(f"{folder}/METADATA").decode())
    assert {f"{folder}/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= set(
        archive.namelist()
    )
    assert metadata["Author"] == "deepcontrol contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert "# deepcontrol" in description
    # A relative path leads nowhere on a package index.
    assert not re.findall(r"\]\((?!https://)", description)
    assert "workbench" in (metadata.get_all("Provides-Extra") or [])
    plain = [r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r]
    assert [re.split(r"\W", requirement)[0] for requirement in plain] == ["torch"]
    assert "deepcontrol.__main__:main" in archive.read(f"{folder}/entry_points.txt").decode()


def test_source_distribution_is_complete(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "README.md",
        "LICENSE",
        "NOTICE",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "Makefile",
        "pyproject.toml",
        "locks/dev.lock",
        "docs/overview.png",
        "benchmarks/results/bench-cuda.csv",
        "results/camvid/study.json",
        "src/deepcontrol/__init__.py",
        "src/streets/__init__.py",
        "tests/test_package.py",
    }
    assert expected <= names, expected - names
    assert not any("/samples/" in name for name in names), "pictures of CamVid images"


def test_installed_wheel_works_with_only_torch(wheel: Path, tmp_path: Path) -> None:
    """Install into a folder that holds torch and its dependencies, and train one step there."""
    link_torch(tmp_path)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--disable-pip-version-check", "--target", str(tmp_path), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert_library_trains(tmp_path)
