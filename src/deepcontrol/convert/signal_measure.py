"""Measure signal and gradient at every layer in one forward and backward run.

Module hooks measure the layers. A TorchFunctionMode measures the functions that models call in
place of modules: residual additions and functional activations. The model's code need not be
traceable for that. Values are measured when they are computed, so in-place operations that follow
do not change them.
"""

import contextlib
import dataclasses
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..nn import AGCLinear
from ..nn.agc import _AGC
from ..nn.conv import _AGCConv
from .dry_run import example_arguments

Kind = Literal["conv", "linear", "norm", "agc", "activation", "add", "other"]

MIN_VALUES_PER_FILTER = 16  # a filter with fewer values may be constant by chance
SAME_VALUE = 1e-10  # variance of a constant filter, relative to the layer's mean square

_KINDS: tuple[tuple[Kind, tuple[type[nn.Module], ...]], ...] = (
    ("agc", (_AGC, _AGCConv, AGCLinear)),
    ("conv", (_ConvNd,)),
    ("linear", (nn.Linear, nn.Bilinear)),
    ("norm", (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)),
    ("other", (nn.MultiheadAttention, nn.RNNBase)),
)
# Probabilities are small whatever the scale of the signal.
_PROBABILITIES = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_RELUS = (nn.ReLU, nn.ReLU6)
_LEAKY_RELUS = (nn.LeakyReLU, nn.RReLU)
_RELU_NAMES = ("relu", "relu6")
_LEAKY_NAMES = ("leaky_relu", "rrelu")
_ACTIVATION_NAMES = (*_RELU_NAMES, *_LEAKY_NAMES, "silu", "gelu", "elu", "hardswish", "mish")
_POOL_NAMES = tuple(f"{kind}avg_pool{d}d" for kind in ("adaptive_", "") for d in (1, 2, 3))


@dataclass
class Measurement:
    """One call of a layer or function.

    Attributes:
        module: The layer, or None for a function.
        relu: Which ReLU the output comes from: "relu", "leaky" or None.
        constant_share: Share of filters whose output is the same for all samples and positions,
            or None if that is not known.
        positions: Positions of a map, over which an AGC layer takes its mean.
        gradient_square: Mean square of the gradient at the output.
        globally_pooled: Whether global average pooling directly follows.
    """

    name: str
    call: int
    kind: Kind
    layer: str
    shape: tuple[int, ...]
    mean: float
    variance: float
    relu: Literal["relu", "leaky"] | None
    open_share: float | None
    constant_share: float | None
    positions: int
    module: nn.Module | None
    gradient_variance: float | None = None
    gradient_square: float | None = None
    globally_pooled: bool = False


def measure(
    model: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None
) -> list[Measurement]:
    """Run a model forward and backward; return one record per layer call.

    The model is left as it was: buffers, gradients, hooks and random number generators.
    """
    model = _unwrapped(model)
    recorder = _Recorder(model)
    with _unchanged(model, example), recorder.hooks():
        args, kwargs = tree_map_only(Tensor, _copy_of_input, example_arguments(model, example))
        with recorder:
            outputs = model(*args, **kwargs)
        recorder.finished = True
        starts, gradients = _start_of_backward(outputs, loss)
        leaves: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        leaves += [a for a in _tensors((args, kwargs)) if a.requires_grad]
        # autograd.grad leaves .grad alone and runs no optimizer that hooks into the backward pass.
        with torch.autocast(starts[0].device.type, enabled=False):
            torch.autograd.grad(starts, leaves, gradients, allow_unused=True)
    return recorder.measurements


class _Recorder(TorchFunctionMode):
    """Record a Measurement for each call of a layer, residual addition or activation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.measurements: list[Measurement] = []
        self.calls: Counter[str] = Counter()
        self.running: list[str] = []  # names of the modules that are being called
        self.layers_running = 0  # code inside of a layer is not recorded
        self.finished = False  # activation checkpointing calls layers again in the backward pass
        self.producers: dict[int, tuple[weakref.ref[Tensor], int, Measurement]] = {}

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Hook all modules of the model; the hooks are removed on exit."""
        handles = []
        try:
            for module in self.names:
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(self.names[module])
        self.layers_running += kind_of(module) is not None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        kind = kind_of(module)
        if kind is None:
            return
        self.layers_running -= 1
        found = next((t for t in _tensors(output) if t.is_floating_point() and t.numel()), None)
        if found is not None and not self.layers_running and not self.finished:
            activation = getattr(module, "activation", None) if kind == "agc" else None
            layer = type(module).__name__ + (f" ({activation})" if activation else "")
            self._record(found, self.names[module], kind, layer, _relu_of(module), module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Measured tensors are detached, so measuring does not record itself.
        if not self.layers_running and isinstance(result, Tensor) and result.requires_grad:
            name = getattr(func, "__name__", "").rstrip("_")
            if name == "add" and _adds_two_maps(args, result):
                self._record(result, self._name(name), "add", name, None, None)
            elif name in _ACTIVATION_NAMES:
                self._record(result, self._name(name), "activation", name, _relu_name(name), None)
        self._mark_pooled(func, args, result)
        return result

    def _name(self, function: str) -> str:
        return ".".join(filter(None, [self.running[-1] if self.running else "", function]))

    def _record(
        self,
        output: Tensor,
        name: str,
        kind: Kind,
        layer: str,
        relu: Literal["relu", "leaky"] | None,
        module: nn.Module | None,
    ) -> None:
        self.calls[name] += 1
        x = _exact(output)
        variance, mean = torch.var_mean(x, correction=0)
        dim = _channel_dim(kind, module, output)
        found = Measurement(
            name=name,
            call=self.calls[name],
            kind=kind,
            layer=layer,
            shape=tuple(output.shape),
            mean=mean.item(),
            variance=variance.item(),
            relu=relu,
            open_share=None if relu is None else (x > 0).double().mean().item(),
            constant_share=None if dim is None else _constant_share(x, dim),
            positions=_positions(module, output),
            module=module,
        )
        self.measurements.append(found)
        self.producers[id(output)] = weakref.ref(output), output._version, found
        if output.requires_grad:

            def record_gradient(gradient: Tensor) -> None:
                g = _exact(gradient)
                found.gradient_variance = g.var(correction=0).item()
                found.gradient_square = g.square().mean().item()

            output.register_hook(record_gradient)

    def _mark_pooled(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Mark the producer of a tensor that global average pooling reads."""
        name = getattr(func, "__name__", "")
        if name not in (*_POOL_NAMES, "mean") or not args or not isinstance(args[0], Tensor):
            return
        x = args[0]
        maps = x.dim() > 2 and isinstance(result, Tensor) and result.shape[:2] == x.shape[:2]
        reference, version, found = self.producers.get(id(x), (None, 0, None))
        if maps and found is not None and reference is not None and reference() is x:
            whole = result.numel() == x.shape[0] * x.shape[1]
            found.globally_pooled |= whole and x._version == version


def kind_of(module: nn.Module) -> Kind | None:
    """Return a layer's kind, or None for a module that is not reported by itself."""
    for kind, classes in _KINDS:
        if isinstance(module, classes):
            return kind
    if type(module).__module__ == nn.ReLU.__module__:
        return None if isinstance(module, _PROBABILITIES) else "activation"
    has_children = next(module.children(), None) is not None
    has_parameters = next(module.parameters(recurse=False), None) is not None
    return "other" if has_parameters and not has_children else None


def _relu_of(module: nn.Module) -> Literal["relu", "leaky"] | None:
    """Return the ReLU that a layer ends with, fused or as a child.

    timm's BatchNormAct2d has it as a child.
    """
    activation = getattr(module, "activation", None)
    if isinstance(activation, str):
        return _relu_name(activation)
    if any(isinstance(part, _RELUS) for part in module.modules()):
        return "relu"
    return "leaky" if any(isinstance(part, _LEAKY_RELUS) for part in module.modules()) else None


def _relu_name(name: str) -> Literal["relu", "leaky"] | None:
    return "relu" if name in _RELU_NAMES else "leaky" if name in _LEAKY_NAMES else None


def _adds_two_maps(args: tuple[Any, ...], result: Tensor) -> bool:
    """Return whether an addition joins two branches, not a bias or an embedding."""
    return len(args) == 2 and all(
        isinstance(a, Tensor)
        and not isinstance(a, nn.Parameter)
        and a.shape == result.shape
        and a.dim() > 1
        for a in args
    )


def _exact(x: Tensor) -> Tensor:
    """Return a detached fp64 copy, in which the square of any fp32 value is finite."""
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


def _channel_dim(kind: Kind, module: nn.Module | None, output: Tensor) -> int | None:
    """Return the dimension of a layer's filters, or None if it is not known."""
    if isinstance(module, nn.Linear):
        return output.dim() - 1
    if isinstance(module, _ConvNd):
        return output.dim() - module.weight.dim() + 1  # 0 without a batch
    if isinstance(module, (_AGC, _NormBase, nn.GroupNorm)) or (
        kind == "activation" and output.dim() in (2, 4, 5)
    ):
        return 1
    return None


def _constant_share(x: Tensor, dim: int) -> float | None:
    """Return the share of filters with the same output for all samples and positions."""
    values = x.transpose(0, dim).flatten(1) if x.dim() > 1 else x[:, None]
    if values.shape[1] < MIN_VALUES_PER_FILTER:
        return None
    limit = SAME_VALUE * x.square().mean()
    return (values.var(1, correction=0) <= limit).double().mean().item()


def _positions(module: nn.Module | None, output: Tensor) -> int:
    if isinstance(module, nn.Linear):
        return output.shape[-1]  # AGCLinear takes its mean over the features
    dims = module.weight.dim() - 2 if isinstance(module, _ConvNd) else output.dim() - 2
    pooled = 4 if getattr(module, "pools", False) else 1  # AGCConvPool2d: the mean comes first
    return pooled * math.prod(output.shape[output.dim() - dims :])


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of torch.compile's, DDP's and DataParallel's wrappers."""
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(
                f"cannot observe the layers of a {type(model).__name__}: TorchScript runs no hooks "
                "inside of it. Expected the model before torch.jit.script or torch.jit.trace"
            )
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _copy_of_input(x: Tensor) -> Tensor:
    """Copy an input and ask for its gradient."""
    copied = x.detach().clone()
    # The second copy is no leaf of the graph, so the model may write to it.
    return copied.requires_grad_().clone() if x.is_floating_point() else copied


def _start_of_backward(
    outputs: Any, loss: Callable[[Any], Tensor] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the tensors that the backward pass starts from, and their gradients."""
    if loss is not None:
        value = loss(outputs)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"expected loss(outputs) to be one differentiable number, got {shown}: return a "
                "tensor that is computed from the outputs, without detach() or item()"
            )
        return [value], [None]
    starts = [t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad]
    if not starts:
        raise ValueError(
            f"the model returned {type(outputs).__name__} without a differentiable tensor: "
            "expected a tensor, or a tuple, dict or dataclass of tensors. Pass loss=, a function "
            "of the outputs, or return the tensors before detach()"
        )
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(t.shape, generator=generator).to(t) for t in starts]
    return starts, list(noise)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output, which may be nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))


@contextlib.contextmanager
def _unchanged(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Restore the model's buffers and the random number generators on exit."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    warned = [m for m in model.modules() if not hasattr(m, "_met_single_position")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        devices = {t.device for t in (*model.parameters(), *model.buffers(), *_tensors(inputs))}
        for kind in sorted({device.type for device in devices} - {"cpu", "meta"}):
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        stack.enter_context(torch.random.fork_rng([]))
        if any(_is_compiled(module) for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        # The report flags these layers itself.
        warnings.filterwarnings("ignore", message=".* got maps of one position")
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, saved in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(saved)
            for module in warned:
                vars(module).pop("_met_single_position", None)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
