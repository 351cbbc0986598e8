"""Check that torch.compile(model) traces a whole network once for all batch sizes."""

import copy

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

BATCHES = (2, 3, 5)  # torch.compile treats 1 as a constant


def assert_compiles_once(
    model: nn.Module,
    shape: tuple[int, ...],
    backend: str,
    autocast: torch.dtype | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Train one step per batch size: no graph break, one compilation, as without torch.compile."""
    torch.compiler.reset()
    peer = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    device = next(model.parameters()).device
    for batch in BATCHES:
        x = torch.randn(batch, *shape, device=device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            y, expected = compiled(x), peer(x)
        g = torch.randn_like(expected)
        y.backward(g)
        expected.backward(g)
        assert relative_error(y, expected) < tolerance
    found, wanted = (flat_gradients(net) for net in (model, peer))
    assert relative_error(found, wanted) < 10 * tolerance
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times for {BATCHES}"
    torch.compiler.reset()


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_error(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
