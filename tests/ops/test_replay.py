"""Replays: the same results and launches, and none where something else must run."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.ops import agc, max_unpool2x2, replay
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


@pytest.mark.parametrize(
    "size", [(8, 8), pytest.param((25, 32), marks=pytest.mark.slow)], ids=["single pass", "tiled"]
)
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


def steps(layer: nn.Module, x: Tensor, g: Tensor, count: int = 3) -> None:
    for _ in range(count):
        layer(x).backward(g)


def test_second_derivatives_with_frozen_filters(device: str, recording: None) -> None:
    """Only bias and mean_scale have gradients, so the input is not saved."""
    neuron = AGCConv2d(3, 8, 3, padding=1, activation="leaky_relu").to(device)
    neuron.weight.requires_grad_(False)
    neuron.gain.requires_grad_(False)
    x, g = torch.randn(2, 3, 8, 8, device=device), torch.randn(2, 8, 8, 8, device=device)
    steps(neuron, x, g)
    g.requires_grad_()
    (dbias,) = torch.autograd.grad(neuron(x), neuron.bias, g, create_graph=True)
    (second,) = torch.autograd.grad(dbias.sum(), g)
    assert second.shape == g.shape
    several = torch.randn(3, 2, 8, 8, 8, device=device)
    (batch,) = torch.autograd.grad(neuron(x), neuron.bias, several, is_grads_batched=True)
    for one, found in zip(several, batch, strict=True):
        (expected,) = torch.autograd.grad(neuron(x), neuron.bias, one)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: AGC2d(6), lambda: AGCConv2d(6, 6, 3, padding=1)], ids=["AGC2d", "AGCConv2d"]
)
def test_saved_tensors_may_return_in_another_layout(
    make: Callable[[], nn.Module], device: str, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save_on_cpu returns contiguous tensors. Six channels have no mask, so the output is saved."""
    # cuDNN may choose another algorithm for the other layout, and TF32 rounds to 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = make().to(device).to(memory_format=torch.channels_last)
    layout = torch.channels_last
    x, g = (torch.randn(2, 6, 8, 8, device=device).to(memory_format=layout) for _ in range(2))
    steps(layer, x, g)
    expected = gradients(layer, x, g)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, lambda a: a.contiguous()):
        found = gradients(layer, x, g)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_with_other_paddings_have_other_plans() -> None:
    x = torch.randn(1, 3, 8, 8)
    changed = AGCConv2d(3, 4, 3, padding=1)
    changed.padding = (0, 0)  # torch's convolutions ignore it as well
    changed(x)
    assert AGCConv2d(3, 4, 3, padding=0)(x).shape == (1, 4, 6, 6)


def test_checks_are_not_skipped_for_a_known_number_of_elements() -> None:
    z, w = torch.randn(4, 4, 5, 5), torch.randn(4)
    agc(z, w, w, w)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 1\)"):
        agc(z, w.view(4, 1), w, w)


def test_tied_parameters_do_not_serve_other_layers(device: str, recording: None) -> None:
    """Layers of the same shapes share a plan, but not their tensors."""
    x, g = torch.randn(2, 3, 8, 8, device=device), torch.randn(2, 8, 8, 8, device=device)
    tied = AGCConv2d(3, 8, 3, padding=1).to(device)
    tied.mean_scale = tied.gain
    steps(tied, x, g)
    other = AGCConv2d(3, 8, 3, padding=1).to(device)
    with torch.no_grad():
        other.gain.normal_()
    found = gradients(other, x, g)
    replay._replays.clear()
    for a, b in zip(found, gradients(other, x, g), strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_without_a_hash_have_no_plan() -> None:
    neuron = AGCConv2d(3, 4, 3)
    neuron.stride = [1, 1]  # type: ignore[assignment]
    assert neuron(torch.randn(1, 3, 8, 8)).shape == (1, 4, 6, 6)


def test_tensors_that_left_a_transform(device: str, recording: None) -> None:
    neuron = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = torch.randn(2, 3, 8, 8, device=device), torch.randn(2, 8, 8, 8, device=device)
    steps(neuron, x, g)
    left: list[Tensor] = []

    def doubled(a: Tensor) -> Tensor:
        left.append(2 * a)
        return a.sum()

    torch.func.grad(doubled)(x)
    torch.testing.assert_close(neuron(left[0]), neuron(2 * x))


def test_pooling_needs_a_batch() -> None:
    for activation in ("relu", "silu"):
        with pytest.raises(ValueError, match="expected"):
            AGCConvPool2d(3, 8, 3, activation=activation)(torch.randn(3, 8, 8))
