"""The convolutional GRU: its equations, gradients, sequences of any length, samples apart."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from deepcontrol import AGCConvGRU2d, AGCConvGRUCell2d, WindowMean, he_init_
from deepcontrol.ops import agc


def test_the_cell_is_a_gru() -> None:
    cell = AGCConvGRUCell2d(3, 4, (3, 5)).double()
    for parameter in cell.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    h = torch.randn(2, 4, 6, 7, dtype=torch.float64)

    def gate(layer: nn.Module, inputs: Tensor) -> Tensor:
        z = nn.functional.conv2d(inputs, layer.weight, padding=(1, 2))  # type: ignore[arg-type]
        return agc(z, layer.gain, layer.bias, layer.mean_scale)  # type: ignore[arg-type]

    r = gate(cell.reset, torch.cat([x, h], 1)).sigmoid()
    z = gate(cell.update, torch.cat([x, h], 1)).sigmoid()
    n = gate(cell.candidate, torch.cat([x, r * h], 1)).tanh()
    torch.testing.assert_close(cell(x, h), (1 - z) * n + z * h)
    torch.testing.assert_close(cell(x), cell(x, torch.zeros_like(h)))


def test_gradients() -> None:
    gru = AGCConvGRU2d(1, 2, 3).double()
    x = torch.randn(3, 1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    h = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(gru, (x, h))
    gru(x)[0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in gru.parameters())


def test_any_length_in_parts() -> None:
    """Two parts with the state passed on are the whole sequence, with the same parameters."""
    gru = AGCConvGRU2d(3, 4, 3)
    x = torch.randn(7, 2, 3, 8, 8)
    outputs, state = gru(x)
    first, middle = gru(x[:3])
    second, last = gru(x[3:], middle)
    torch.testing.assert_close(torch.cat([first, second]), outputs)
    torch.testing.assert_close(last, state)
    assert len(list(gru.parameters())) == 3 * 4
    by_batch = AGCConvGRU2d(3, 4, 3, batch_first=True)
    by_batch.load_state_dict(gru.state_dict())
    torch.testing.assert_close(by_batch(x.transpose(0, 1))[0].transpose(0, 1), outputs)


def test_samples_do_not_meet_and_layouts_agree() -> None:
    gru = he_init_(AGCConvGRU2d(3, 4, 3))
    x = torch.randn(4, 3, 3, 8, 8)
    outputs, _ = gru(x)
    torch.testing.assert_close(gru(x[:, 1:2])[0], outputs[:, 1:2])
    last = x.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (4, 3))
    torch.testing.assert_close(gru(last)[0], outputs)


def test_the_state_stays_bounded_over_many_steps() -> None:
    gru = AGCConvGRU2d(3, 4, 3)
    state = None
    with torch.no_grad():
        for _ in range(8):
            outputs, state = gru(torch.randn(16, 1, 3, 8, 8), state)
    assert outputs.abs().max() <= 1
    assert outputs.std() > 0.05


def test_options_reach_the_gates() -> None:
    gru = AGCConvGRU2d(3, 4, 3, weight_norm=True, background=WindowMean(3), noise=0.1, dilation=2)
    for layer in (gru.cell.reset, gru.cell.update, gru.cell.candidate):
        assert (layer.weight_norm, layer.background, layer.noise) == (True, WindowMean(3), 0.1)
        assert layer.dilation == (2, 2)
    assert gru(torch.randn(2, 1, 3, 8, 8))[0].shape == (2, 1, 4, 8, 8)


@pytest.mark.slow
def test_compiles_and_exports() -> None:
    gru, x = AGCConvGRU2d(3, 4, 3), torch.randn(3, 2, 3, 8, 8)
    expected = gru(x)
    compiled = torch.compile(gru, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    exported = torch.export.export(gru, (x,))
    torch.testing.assert_close(exported.module()(x), expected)


def test_errors() -> None:
    gru = AGCConvGRU2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"expected a sequence \(T, N, C, H, W\)"):
        gru(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"expected an input \(N, 3, H, W\)"):
        gru(torch.randn(2, 1, 5, 8, 8))
    with pytest.raises(ValueError, match="expected a state of shape"):
        gru(torch.randn(2, 1, 3, 8, 8), torch.zeros(1, 4, 9, 8))
