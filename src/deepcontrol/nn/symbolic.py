"""torch.fx takes AGC's layers whole, as it takes torch's own: one node each.

A layer asks its input for its shape and dtype, which a symbol does not have. torch's tracers know
the modules of torch.nn by their address, and no others; so a layer that is called with a symbol
enters itself into the graph, whoever traces: torch.fx, torchvision's feature extraction, timm's.
"""

from typing import Any

from torch.fx import Proxy


class OneNode:
    """Makes a module one node. It stands before the module's own class: hooks and what subclasses
    do are the node's, and must not be traced besides."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        symbol = args[0] if args else kwargs.get("input")
        if isinstance(symbol, Proxy):
            tracer: Any = symbol.tracer

            def node(*args: Any, **kwargs: Any) -> Any:
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

            # Told in the tracer's own way, since some (torchvision's) note where they are by it.
            return tracer.call_module(self, node, args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]
