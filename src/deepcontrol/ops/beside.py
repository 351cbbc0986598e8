"""Two halves of a backward at once: the filters' gradient beside the input's, in a CUDA graph.

Neither needs the other, and of small maps neither fills a GPU. While a graph is captured, the one
is recorded on a stream of its own: the graph then has two branches, which run side by side. Both
meet before the backward returns, so that no memory is given back that a branch still uses.
"""

import functools

import torch
from torch import Tensor


def can_go_beside(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def beside(x: Tensor) -> torch.cuda.StreamContext:
    """What is launched in this context runs beside what is launched between it and join(x)."""
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    return torch.cuda.stream(stream)


def join(x: Tensor) -> None:
    torch.cuda.current_stream(x.device).wait_stream(_stream(x.device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
