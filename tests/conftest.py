"""Fixtures of all tests: a fixed seed, and the device of a test."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Without a device, Triton's interpreter runs the kernels. Read when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The compiled helper has tests of its own. DEEPCONTROL_NATIVE=1 runs all tests with it, if built.
os.environ.setdefault("DEEPCONTROL_NATIVE", "0")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at its first use

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    # Plans of one test, made while it replaced a function or a limit, are none of the next one.
    replay = sys.modules.get("deepcontrol.ops.replay")
    if replay is not None:
        replay._replays.clear()
    torch.use_deterministic_algorithms(False)  # a training run sets it for its process


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
