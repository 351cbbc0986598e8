"""Fixtures: a cache of decoded images, a finished tiny run, a CamVid folder."""

import os
from pathlib import Path

import pytest
import torch

from tests.noise import make_camvid
from tests.workbench.train.runs import prepare_data, train_here


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a temporary cache, decoded once, and one thread per process."""
    folder = tmp_path_factory.getbasetemp().parent / "cache"
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)
    prepare_data()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run without interruption, for comparison."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_here(run)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    return make_camvid(tmp_path / "camvid")
