"""A convolutional GRU with AGC (automatic gain control) in every gate.

The paper notes that for recurrent networks techniques with minibatch statistics "are not
applicable": a network that is applied again and again to its own state has other statistics at
every step, and a network trained on 8 steps has none for step 20. AGC depends only on the current
map: every step is the same function with the same parameters, for any sequence length.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.background import Background
from .conv import AGCConv2d


class AGCConvGRUCell2d(nn.Module):
    """One step of a convolutional GRU with an AGC per gate.

        r  = sigmoid( AGC(conv([x, h])) )                 reset gate
        z  = sigmoid( AGC(conv([x, h])) )                 update gate
        n  = tanh( AGC(conv([x, r * h])) )                candidate
        h' = (1 - z) * n + z * h

    Each gate is an AGCConv2d with activation="none" and its own gain, bias and mean_scale. The maps
    keep their size.

    Args:
        in_channels: Channels of x.
        hidden_channels: Channels of the state h.
        kernel_size: Kernel size of the gate convolutions, a number or (height, width).
        dilation: Dilation of the gate convolutions.
        weight_norm, background, noise: As in AGCConv2d, for every gate.
        device, dtype: Device and dtype of the parameters.

    Shape:
        x (N, in_channels, H, W), h (N, hidden_channels, H, W) or None for zeros
        -> the next state (N, hidden_channels, H, W).

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1.

    >>> cell = AGCConvGRUCell2d(3, 8, kernel_size=3)
    >>> cell(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int | tuple[int, int],
        dilation: int | tuple[int, int] = 1,
        *,
        weight_norm: bool = False,
        background: Background = "mean",
        noise: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.hidden_channels = in_channels, hidden_channels

        def gate() -> AGCConv2d:
            return AGCConv2d(
                in_channels + hidden_channels,
                hidden_channels,
                kernel_size,
                padding="same",
                dilation=dilation,
                activation="none",
                weight_norm=weight_norm,
                background=background,
                noise=noise,
                device=device,
                dtype=dtype,
            )

        self.reset, self.update, self.candidate = gate(), gate(), gate()

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"expected an input (N, {self.in_channels}, H, W), got {tuple(x.shape)}"
            )
        if h is None:
            h = initial_state(self, x)
        elif h.shape != (x.shape[0], self.hidden_channels, *x.shape[2:]):
            raise ValueError(
                f"expected a state of shape {(x.shape[0], self.hidden_channels, *x.shape[2:])} for "
                f"the input {tuple(x.shape)}, got {tuple(h.shape)}"
            )
        both = torch.cat([x, h], 1)
        r, z = torch.sigmoid(self.reset(both)), torch.sigmoid(self.update(both))
        n = torch.tanh(self.candidate(torch.cat([x, r * h], 1)))
        return n + z * (h - n)


def initial_state(cell: Any, x: Tensor) -> Tensor:
    """Return zeros (N, hidden_channels, H, W) with the dtype, device and layout of x."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    else:
        layout = torch.contiguous_format
    shape = (x.shape[0], cell.hidden_channels, *x.shape[2:])
    return torch.zeros(shape, dtype=x.dtype, device=x.device).to(memory_format=layout)


class AGCConvGRU2d(nn.Module):
    """A convolutional GRU with an AGC per gate, over sequences of any length.

    It applies one AGCConvGRUCell2d, with the same parameters, to every step of a sequence. To
    truncate backpropagation, call it on one part of the sequence after another and pass
    `state.detach()` on.

    Args:
        in_channels: Channels of the input.
        hidden_channels: Channels of the state and the outputs.
        kernel_size: Kernel size of the gate convolutions.
        batch_first: Sequences are (N, T, C, H, W) instead of (T, N, C, H, W), as in nn.GRU.
        **options: dilation, weight_norm, background, noise, device and dtype of AGCConvGRUCell2d.

    Shape:
        x (T, N, in_channels, H, W) and h (N, hidden_channels, H, W) or None for zeros
        -> outputs (T, N, hidden_channels, H, W) and the last state (N, hidden_channels, H, W).

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, Eq. 1, and section 1 on
        recurrence.

    >>> gru = AGCConvGRU2d(3, 8, kernel_size=3)
    >>> outputs, state = gru(torch.randn(5, 2, 3, 16, 16))
    >>> outputs.shape, torch.equal(outputs[-1], state)
    (torch.Size([5, 2, 8, 16, 16]), True)
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int | tuple[int, int],
        batch_first: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.cell = AGCConvGRUCell2d(in_channels, hidden_channels, kernel_size, **options)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        time = 1 if self.batch_first else 0
        if x.dim() != 5 or x.shape[time] == 0:
            order = "(N, T, C, H, W)" if self.batch_first else "(T, N, C, H, W)"
            raise ValueError(
                f"expected a sequence {order} of at least one step, got {tuple(x.shape)}"
            )
        outputs = []
        for step in x.unbind(time):
            h = self.cell(step, h)
            outputs.append(h)
        assert h is not None
        return torch.stack(outputs, time), h

    def extra_repr(self) -> str:
        return "batch_first=True" if self.batch_first else ""
