"""Runs of a tiny network on a few streets, in processes of their own."""

import os
from pathlib import Path

import pytest
import torch

from tests.noise import make_camvid
from tests.workbench.train.runs import prepare_data, train_here


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Decoded once, and not into the user's own cache; one thread each, as many run at once."""
    folder = tmp_path_factory.getbasetemp().parent / "cache"
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)
    prepare_data()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run from start to end, to compare others with."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_here(run)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    return make_camvid(tmp_path / "camvid")
