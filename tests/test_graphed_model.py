"""graphed: a loop with replayed forward and backward equals an ordinary loop.

Without a GPU, a stand-in for torch.cuda.make_graphed_callables writes outputs and gradients to
fixed memory, as a replay does.
"""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

from deepcontrol import AGCConv2d, graphed, graphed_model

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = [AGCConv2d(3, 8, 3, padding=1), AGCConv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).to(device)


def batches(count: int, device: str = "cpu", batch: int = 2) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(batch, 3, 8, 8, generator=rng).to(device),
            torch.randint(0, 4, (batch, 8, 8), generator=rng).to(device),
        )
        for _ in range(count)
    ]


def replayed_on_cpu(model: nn.Module, samples: tuple[Tensor, ...]) -> nn.Module:
    """Do as torch.cuda.make_graphed_callables: fixed memory for input, output and gradients.

    The forward overwrites the gradients' memory, which it may share with them.
    """
    assert not gc.isenabled()  # it could destroy an older graph during the capture
    forward, training = model.forward, model.training
    parameters = [p for p in model.parameters() if p.requires_grad]
    (x,) = samples
    differentiated = [x, *parameters] if x.requires_grad else parameters
    gradients = [torch.zeros_like(p) for p in differentiated]
    output = forward(x).detach()

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor, *_: Tensor) -> Tensor:
            x.copy_(given)
            for static in gradients:
                static.fill_(torch.nan)
            with torch.enable_grad():
                saved["y"] = forward(x)
            output.copy_(saved["y"].detach())
            return output.detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            for static, new in zip(
                gradients, torch.autograd.grad(saved["y"], differentiated, g), strict=True
            ):
                static.copy_(new)
            found = [static.detach() for static in gradients]
            return tuple(found if x.requires_grad else [None, *found])

    saved: dict[str, Tensor] = {}

    def replay(given: Tensor) -> Tensor:
        return Replay.apply(given, *parameters) if model.training == training else forward(given)

    model.forward = replay  # type: ignore[method-assign]
    return model


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(graphed_model, "_obstacle", lambda inputs: None)
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", replayed_on_cpu)
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device(device))
    return request.param


def close(device: str) -> dict[str, float]:
    tolerance = 0.0 if device == "cpu" else 1e-3
    return {"rtol": tolerance, "atol": tolerance}


Loop = Callable[[nn.Module, Callable[..., Tensor], torch.optim.Optimizer, str], None]


def scheduled(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str) -> None:
    scheduler = CosineAnnealingLR(optimizer, 6)
    average = AveragedModel(model)
    for x, labels in batches(6, device):
        optimizer.zero_grad()
        cross_entropy(call(x), labels).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            p.lerp_(q, 0.5)  # compared by the caller


def accumulated(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str) -> None:
    for i, (x, labels) in enumerate(batches(6, device)):
        (cross_entropy(call(x), labels) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def zeroed(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str) -> None:
    for x, labels in batches(6, device):
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(call(x), labels).backward()
        optimizer.step()


def with_a_smaller_batch(
    model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str
) -> None:
    for x, labels in [*batches(2, device), *batches(1, device, 1), *batches(2, device)]:
        optimizer.zero_grad()
        cross_entropy(call(x), labels).backward()
        optimizer.step()


def two_forwards(
    model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str
) -> None:
    """Both losses are part of one backward, as with two views of an image."""
    given = batches(6, device)
    for (x, labels), (other, more) in zip(given[::2], given[1::2], strict=True):
        optimizer.zero_grad()
        (cross_entropy(call(x), labels) + cross_entropy(call(other), more)).backward()
        optimizer.step()


def evaluated(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, device: str) -> None:
    """Outputs are used after later calls."""
    kept = []
    for x, labels in batches(3, device):
        optimizer.zero_grad()
        logits = call(x)
        cross_entropy(logits, labels).backward()
        optimizer.step()
        with torch.no_grad():
            kept.append((logits.detach(), call(x)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-3 * torch.stack([a.mean() + b.mean() for a, b in kept]).sum())


# A large eps: with Adam's default, rounding decides the direction of tiny gradients.
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=0.01),
}
LOOPS = [scheduled, accumulated, zeroed, with_a_smaller_batch, two_forwards, evaluated]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loop_equals_an_ordinary_loop(device: str, loop: Loop, name: str) -> None:
    model = network(device)
    peer = copy.deepcopy(model)
    call = graphed(model, batches(1, device)[0][0])
    loop(model, call, OPTIMIZERS[name](model.parameters()), device)
    loop(peer, peer, OPTIMIZERS[name](peer.parameters()), device)
    for p, q in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(p, q, **close(device))


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(enabled: bool, device: str) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        graphed(network(device), batches(1, device)[0][0])
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.gpu
def test_an_older_graph_is_destroyed_after_a_capture() -> None:
    """A graph in a reference cycle is destroyed by the garbage collector, at any allocation."""
    threshold = gc.get_threshold()
    x = batches(1, "cuda")[0][0]
    try:
        gc.disable()
        for _ in range(3):
            cycle: list[Any] = [graphed(network("cuda"), x)]
            cycle.append(cycle)
            del cycle
        gc.set_threshold(1)
        gc.enable()
        assert graphed(network("cuda"), x)(x).isfinite().all()
    finally:
        gc.set_threshold(*threshold)


def test_reasons_to_run_eagerly(device: str) -> None:
    model = network(device)
    (x, labels), (small, _) = batches(1, device)[0], batches(1, device, 1)[0]
    call = graphed(model, x)
    for _ in range(2):  # an output that is dropped needs no backward
        y = call(x)
        assert call.why_eager is None
        del y
    loss = cross_entropy(call(x), labels)
    call(x)
    assert call.why_eager == "the backward of the previous forward is still to run"
    loss.backward()
    call(x)
    assert call.why_eager is None
    call(small)
    assert "(1, 3, 8, 8)" in str(call.why_eager)
    with torch.no_grad():
        call(x)
    assert call.why_eager == "gradients are disabled"
    model.eval()
    call(x)
    assert call.why_eager == "the model was captured with training=True"


def test_gradients_of_inputs_are_kept(device: str) -> None:
    """The next backward overwrites the graphs' memory, but not the gradient of an earlier input."""
    model = network(device)
    inputs = [x.requires_grad_() for x, _ in batches(2, device)]
    call = graphed(model, inputs[0])
    for x in inputs:
        call(x).square().sum().backward()
    for x in inputs:
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected, **close(device))


def test_gradient_of_an_output_alone_is_no_backward(device: str) -> None:
    """It stops at the output, so the activations of that forward are still needed."""
    model = network(device)
    (x, labels), (other, _) = batches(2, device)
    call = graphed(model, x)
    y = call(x)
    (g,) = torch.autograd.grad(cross_entropy(y, labels), y)
    call(other)
    assert call.why_eager == "the backward of the previous forward is still to run"
    y.backward(g)
    expected = torch.autograd.grad(model(x), list(model.parameters()), g)
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, **close(device))


def test_model_is_unchanged(device: str) -> None:
    model = nn.Sequential(network(device), nn.BatchNorm2d(4)).to(device)
    state = copy.deepcopy(model.state_dict())
    call = graphed(model, batches(1, device)[0][0])
    assert "forward" not in model.__dict__
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert all(p.grad is None for p in model.parameters())
    assert call.model is model


def test_every_call_is_eager_on_a_cpu() -> None:
    model = network()
    (x, _) = batches(1)[0]
    call = graphed(model, x, autocast=torch.bfloat16)
    assert call(x).dtype == torch.bfloat16
    assert "need a CUDA device" in str(call.why_eager)
    with pytest.raises(ValueError, match="expected a batch of tensors"):
        graphed(model)


@pytest.mark.gpu
def test_autocast_is_captured() -> None:
    model = network("cuda")
    (x, labels) = batches(1, "cuda")[0]
    call = graphed(model, x, autocast=torch.bfloat16)
    y = call(x)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(y, model(x), rtol=1e-2, atol=1e-2)
    cross_entropy(y.float(), labels).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
