"""The host side of a launch: few Python frames above it, and no compiler in eager mode."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from deepcontrol import AGCConv2d
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.ops import replay

pytest.importorskip("triton")

from deepcontrol.ops.triton import agc, agc_pool, blocks, gain

gain_conv = importlib.import_module("deepcontrol.ops.gain_conv")  # ops.gain_conv is a function

MAX_FRAMES = 5  # AGCConv2d.forward and the function that calls kernel[grid](...) included
KERNELS = (
    (gain, "_scale"),
    (blocks, "agc_sum_kernel"),
    (blocks, "window_mean_kernel"),
    (agc, "agc_forward_kernel"),
    (agc_pool, "agc_pool_forward_kernel"),
)


class StubKernel:
    """A kernel that computes nothing and records the stack of Python functions above it.

    Two of its frames stand for Triton's launcher: `run` here and in triton/launch.py.
    """

    def __init__(self, name: str, launches: list[tuple[str, list[str]]]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            stack: list[str] = []
            frame: FrameType | None = sys._getframe(2)
            while frame is not None:
                stack.append(frame.f_code.co_qualname)
                if frame.f_code.co_name == "forward" and isinstance(
                    frame.f_locals.get("self"), AGCConv2d
                ):
                    break
                frame = frame.f_back
            self.launches.append((self.name, stack))

        return run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Run the kernels' path on the CPU with stubs; return the list of (kernel, stack)."""
    recorded: list[tuple[str, list[str]]] = []
    for name in ("agc", "gain_conv", "pool"):
        module = importlib.import_module(f"deepcontrol.ops.{name}")
        monkeypatch.setattr(module, "uses_kernels", lambda z, traced=False: True)
    monkeypatch.setattr(replay, "RECORDED_DEVICES", ["cpu"])
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, StubKernel(name, recorded))
    return recorded


def run_repeatedly(launches: list[tuple[str, list[str]]], call: Callable[[], object]) -> None:
    """Call three times, and keep the launches of the last one: the first two are prepared."""
    for _ in range(3):
        launches.clear()
        call()


def assert_short(launches: list[tuple[str, list[str]]], kernels: list[str]) -> None:
    assert [name for name, _ in launches] == kernels
    for name, stack in launches:
        assert len(stack) <= MAX_FRAMES, (name, stack)


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("size", "kernels"),
    [
        ((8, 8), ["_scale", "agc_forward_kernel"]),
        ((40, 40), ["_scale", "agc_sum_kernel", "agc_forward_kernel"]),
    ],
    ids=["single pass", "tiled"],
)
def test_neuron(
    size: tuple[int, int],
    kernels: list[str],
    grad: bool,
    weight_norm: bool,
    launches: list[tuple[str, list[str]]],
) -> None:
    neuron = AGCConv2d(3, 8, 3, padding=1, weight_norm=weight_norm)
    with torch.set_grad_enabled(grad):
        run_repeatedly(launches, lambda: neuron(torch.randn(2, 3, *size)))
    assert_short(launches, kernels)


def test_neuron_and_pooling(launches: list[tuple[str, list[str]]]) -> None:
    neuron = AGCConvPool2d(3, 8, 3, padding=1)
    run_repeatedly(launches, lambda: neuron(torch.randn(2, 3, 40, 40)))
    assert_short(launches, ["_scale", "agc_sum_kernel", "agc_pool_forward_kernel"])


def test_derived_means(
    launches: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first neuron sums its input for the mean, the second finds the sums stored."""
    monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", 0)
    for name in ("gain_conv", "neuron"):
        module = importlib.import_module(f"deepcontrol.ops.{name}")
        monkeypatch.setattr(module, "HALF_TYPES", (torch.float32,))
    first, second = AGCConv2d(1, 4, 3, padding=1), AGCConv2d(4, 4, 3, padding=1)
    first.consumer_ratio = 1.0
    both = nn.Sequential(first, second)
    run_repeatedly(launches, lambda: both(torch.randn(2, 1, 40, 40)))
    means = ["window_mean_kernel", "agc_forward_kernel"]
    assert_short(launches, ["_scale", "agc_sum_kernel", *means, "_scale", *means])


def test_eager_mode_does_not_import_the_compiler() -> None:
    """Registering the ops for torch.compile does, and takes seconds."""
    script = """
import sys
from deepcontrol.ops.triton import agc, agc_pool, gain, pool
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
