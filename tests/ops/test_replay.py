"""Replays: the same results and launches, and none where something else must run."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.ops import max_unpool2x2, replay
from deepcontrol.ops.replay import Replay

pytest.importorskip("triton")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels in Triton's interpreter, and record them on the CPU too."""
    if not torch.cuda.is_available():
        for name in ("agc", "gain_conv", "pool"):
            module = importlib.import_module(f"deepcontrol.ops.{name}")
            monkeypatch.setattr(module, "uses_kernels", lambda z, traced=False: True)
    monkeypatch.setattr(replay, "RECORDED_DEVICES", ["cuda", "cpu"])


class Stage(nn.Module):
    """A neuron, one with pooling, the unpooling, and a norm: all ops that are replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = AGCConv2d(3, 8, 3, padding=1)
        self.pooling = AGCConvPool2d(8, 8, 3, padding=1, weight_norm=True)
        self.norm = AGC2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.neuron(x)
        pooled, index = self.pooling(x)
        return self.norm(max_unpool2x2(pooled, index, x.shape[2:]))


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    for p in model.parameters():
        p.grad = None
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls of the kernels' host code, which a replay does not make."""
    calls: list[str] = []
    launch = importlib.import_module("deepcontrol.ops.triton.launch")
    original = launch.launch

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(kernel.__name__)
        original(kernel, *args, **kwargs)

    for name in ("agc", "agc_pool", "gain", "pool"):
        module = importlib.import_module(f"deepcontrol.ops.triton.{name}")
        monkeypatch.setattr(module, "launch", counted)
    return calls


@pytest.mark.parametrize("size", [(8, 8), (25, 32)], ids=["single pass", "tiled"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_repeats_what_it_recorded(
    size: tuple[int, int],
    memory_format: torch.memory_format,
    device: str,
    recording: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other values and other parameters, but the same shapes."""
    calls = count_launches(monkeypatch)
    model = Stage().to(device).to(memory_format=memory_format)
    plain = Stage().to(device).to(memory_format=memory_format)
    for step in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        plain.load_state_dict(model.state_dict())
        x = torch.randn(2, 3, *size, device=device).to(memory_format=memory_format)
        g = torch.randn(2, 8, *size, device=device).to(memory_format=memory_format)
        calls.clear()
        actual = gradients(model, x, g)
        assert bool(calls) == (step < 2), (step, calls)
        replay._replays.clear() if step == 3 else None
        kept = dict(replay._replays)
        replay._replays.clear()
        expected = gradients(plain, x, g)  # never recorded: each plan is new
        replay._replays.update(kept)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0)
            assert a.stride() == e.stride()


def recorded(function: Callable[..., Any], *tensors: Tensor | None) -> Replay:
    run = Replay(function)
    run(*tensors)
    run(*tensors)
    return run


def test_ops_of_torch_are_not_recorded(recording: None) -> None:
    run = recorded(lambda a: a + 1, torch.ones(4))
    assert not run.recorded
    assert run(torch.full((4,), 2.0)).tolist() == [3.0] * 4


def scale(weight: Tensor, gain: Tensor) -> Tensor:
    kernels = importlib.import_module("deepcontrol.ops.triton.gain")
    return kernels.scale(weight, gain, weight.dtype)


def test_another_layout_and_alignment_run_the_function(device: str, recording: None) -> None:
    weight, gain = torch.randn(4, 3, 3, 3, device=device), torch.randn(4, device=device)
    run = recorded(scale, weight, gain)
    assert run.recorded
    channels_last = weight.to(memory_format=torch.channels_last)
    unaligned = torch.randn(4 * 27 + 1, device=device)[1:].view(4, 3, 3, 3)
    for w in (weight, channels_last, unaligned):
        torch.testing.assert_close(run(w, gain), w * gain[:, None, None, None])


def test_two_results_do_not_share_memory(device: str, recording: None) -> None:
    weight, gain = torch.randn(4, 3, 3, 3, device=device), torch.randn(4, device=device)
    run = recorded(scale, weight, gain)
    first, second = run(weight, gain), run(weight, 2 * gain)
    torch.testing.assert_close(2 * first, second)


def test_sizes_that_occur_once_are_not_recorded(recording: None) -> None:
    run = Replay(scale)
    run(torch.randn(4, 3, 3, 3), torch.randn(4))
    assert run.calls == 1
    assert not run.recorded
