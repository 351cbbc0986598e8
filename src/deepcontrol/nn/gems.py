"""GEMS (gated effective minibatch size): divide gradients by the open points.

The loss is a mean over labeled pixels, so the gradient of a filter is a sum over the P positions of
its map in the minibatch, divided by a number that is the same for every filter:

    dL/dW_c = (1 / M) * sum over p of h_c[p] * (input at p)          h_c[p] = 0 where ReLU is closed

Only the O_c open positions contribute. The paper proposes "to instead normalise the gradients not
by the mapsize*minibatchsize but to the number of non-saturated points". The loss has divided by all
of them, so GEMS multiplies the gradient of filter c by

    f_c = min(P / O_c, cap)

That is the gradient of its weight, gain, bias and mean_scale: everything that only acts through the
map of this filter. P is the number of positions of the layer's own map, so f_c = 1 for a filter
that is always open, in every layer and at every resolution. A filter that never opens has no
gradient, and f_c = cap changes nothing.

P and O_c are sums over the minibatch: over accumulation steps and, with torch.distributed, over
processes. N steps of batch 1 therefore give the update of one step of batch N.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layout import accumulate_dtype
from .conv import _AGCConv
from .linear import AGCLinear

PARAMETERS = ("weight", "gain", "bias", "mean_scale")


class GEMS:
    """Divide each filter's gradient by its number of open points, not by all points.

    It counts the open ReLUs of every AGCConv1d/2d/3d and AGCLinear with activation="relu" in the
    forward, and multiplies the gradients of filter c by min(points / open points, cap) when
    `optimizer.step()` is called. Any torch optimizer works. Other parameters keep their gradients.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        gems = GEMS(model, optimizer)          # then train as before

    Counts are summed over all forwards in training mode with gradients since the last step, and
    over the processes of torch.distributed. There is no state between steps and no synchronization
    with the host, so GEMS works in a captured step (TrainingStep). AGCConvPool2d counts its pooled
    maps, where gradients arrive.

    Gradients are scaled in `optimizer.step()`, after clipping. To clip the scaled gradients, call
    `scale_()` before.

    Args:
        model: A model with AGC layers, on its final device; may be DistributedDataParallel.
        optimizer: Optimizer of the model's parameters.
        cap: Largest factor.
        control: The control experiment: instead of each filter, scale the whole gradient by one
            factor, so that its norm is the one that GEMS would give.

    Raises:
        ValueError: If no layer of the model can be counted, or if parameters are sharded (FSDP) or
            parametrized.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, section 1.

    >>> from deepcontrol import AGCConv2d
    >>> model = AGCConv2d(3, 8, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> gems = GEMS(model, optimizer)
    >>> model(torch.randn(1, 3, 16, 16)).mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cap: float = 16.0,
        control: bool = False,
    ) -> None:
        if not cap >= 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        self.layers: list[Any] = [m for m in model.modules() if _is_counted(m)]
        if not self.layers:
            raise ValueError(
                f"no layer of {type(model).__name__} has open points to count: expected AGCConv or "
                'AGCLinear layers with activation="relu". Convert the model with to_agc'
            )
        if any(hasattr(p, "device_mesh") for p in model.parameters()):
            raise ValueError(
                "GEMS scales whole filters and does not support sharded parameters (FSDP): use "
                "DistributedDataParallel"
            )
        for layer in self.layers:
            missing = [name for name in PARAMETERS if name not in layer._parameters]
            if missing:
                raise ValueError(
                    f"{missing[0]} of {layer} is computed by a parametrization, so the gradient of "
                    "a filter cannot be scaled: remove the parametrization (the layer's own "
                    "weight_norm=True is supported)"
                )
        self.optimizer, self.cap, self.control = optimizer, cap, control
        self._group = getattr(model, "process_group", None)  # set by DistributedDataParallel
        sizes = [layer.bias.shape[0] for layer in self.layers]
        # Open points and all points of each filter, in one buffer that a CUDA graph can refer to.
        # In fp64, which counts exactly and divides without rounding twice.
        device = self.layers[0].bias.device
        self._counts = torch.zeros(2, sum(sizes), dtype=torch.float64, device=device)
        counts = self._counts.split(sizes, 1)
        self._hooks = [
            layer.register_forward_hook(_counter(own))
            for layer, own in zip(self.layers, counts, strict=True)
        ]
        self._sizes = sizes
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], more: dict[str, Any]
    ) -> None:
        closure = args[1] if len(args) > 1 else more.get("closure")
        if closure is not None:
            raise ValueError(
                "GEMS scales the gradients before optimizer.step, and a closure computes them "
                "inside of it: call the backward yourself, and step() without a closure"
            )
        self.scale_()

    @torch.no_grad()
    def scale_(self) -> None:
        """Scale the gradients and restart the counts. Called by `optimizer.step()`."""
        factors = self.factors()
        scaled = [
            (parameter.grad, _over_filters(factor, parameter.grad, layer))
            for layer, factor in zip(self.layers, factors, strict=True)
            for name in PARAMETERS
            if (parameter := layer._parameters[name]) is not None and parameter.grad is not None
        ]
        if self.control:
            self._scale_norm_(scaled)
        else:
            for gradient, factor in scaled:
                gradient.mul_(factor.to(gradient.dtype))
        self.reset()

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, ...]:
        """Return each layer's factors (C,) for the counts so far; 1 without a forward."""
        counts = self._counts
        if _is_distributed():
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=self._group)
        open_points, points = counts
        factors = (points / open_points.clamp(min=1)).clamp(1.0, self.cap)
        return factors.split(self._sizes)

    def reset(self) -> None:
        """Forget the counts, for a step that is skipped."""
        self._counts.zero_()

    def remove(self) -> None:
        """Remove all hooks: the model and the optimizer train as without GEMS."""
        for hook in self._hooks:
            hook.remove()

    def _scale_norm_(self, scaled: list[tuple[Tensor, Tensor]]) -> None:
        """Scale all gradients of the optimizer to the norm that the factors would give."""
        gradients = [p.grad for g in self.optimizer.param_groups for p in g["params"]]
        squares = {id(a): a.double().square().sum() for a in gradients if a is not None}
        before = torch.stack(list(squares.values())).sum()
        for gradient, factor in scaled:
            squares[id(gradient)] = (gradient.double() * factor).square().sum()
        after = torch.stack(list(squares.values())).sum()
        ratio = torch.where(before > 0, (after / before).sqrt(), 1.0)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(ratio.to(gradient.dtype))


def _is_counted(module: nn.Module) -> bool:
    return isinstance(module, (_AGCConv, AGCLinear)) and module.activation == "relu"


def _counter(counts: Tensor) -> Any:
    """Return a forward hook that adds to the open points and all points, (2, C)."""

    # A plain function: a deep copy of the model shares it, and does not copy the optimizer.
    def count(layer: Any, args: Any, output: Any) -> None:
        if not (layer.training and torch.is_grad_enabled()):
            return
        y = (output[0] if isinstance(output, tuple) else output).detach()
        if isinstance(layer, AGCLinear):
            y = y.reshape(-1, y.shape[-1])
        elif y.dim() < layer.weight.dim():  # without a batch
            y = y.unsqueeze(0)
        others = (0, *range(2, y.dim()))
        # The "0-norm" counts elements other than 0 in one pass, exactly up to 2^24 in fp32. An
        # output of ReLU is open where it is not 0.
        counts[0].add_(torch.linalg.vector_norm(y, 0, others, dtype=accumulate_dtype(y.dtype)))
        counts[1].add_(y.numel() // y.shape[1])

    return count


def _over_filters(factor: Tensor, gradient: Tensor, layer: Any) -> Tensor:
    """View the factors (C_out,) so that they broadcast over a gradient of a layer."""
    if gradient.dim() > 1 and getattr(layer, "transposed", False):
        # The filters of a transposed convolution are (C_in, C_out / groups, *).
        groups = layer.groups
        factor = factor.reshape(groups, 1, -1).expand(-1, layer.in_channels // groups, -1)
        return factor.reshape(*gradient.shape[:2], *(1,) * (gradient.dim() - 2))
    return factor.reshape(-1, *(1,) * (gradient.dim() - 1))


def _is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
