"""Decode the data once, into a cache of the test session."""

import os

import pytest

from tests.workbench.train.runs import prepare_data


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp().parent / "cache")
    prepare_data()
