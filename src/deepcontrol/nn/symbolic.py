"""torch.fx takes AGC's layers whole, as it takes torch's own: one node each.

A layer asks its input for its shape and dtype, which a symbol does not have. torch's tracers know
the modules of torch.nn by their address, and no others; so a layer that meets a symbol enters
itself into the graph, whoever traces: torch.fx, torchvision's feature extraction, timm's.
"""

from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.fx.proxy import TraceError


def is_symbol(input: object) -> bool:
    return isinstance(input, Proxy)


def as_node(layer: nn.Module, symbol: Any) -> Any:
    """What stands for the layer's output in the graph that is being made."""
    tracer = symbol.tracer
    path = tracer.path_of_module(layer)
    if not path:
        name = type(layer).__name__
        raise TraceError(f"{name} is one node and no graph: trace nn.Sequential({name}(...))")
    return tracer.create_proxy("call_module", path, (symbol,), {})
