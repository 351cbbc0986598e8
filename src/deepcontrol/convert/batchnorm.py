"""Find the BatchNorms of a model, check that they convert, and read AGC parameters from them."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ..ops.layout import accumulate_dtype
from .layers import AGCParameters

_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return every BatchNorm of a model by its (first) name.

    Raises:
        ValueError: If the model has none, or contains modules that cannot be converted.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which has registered its parameters "
            "already: convert the model before DistributedDataParallel wraps it"
        )
    found, frozen = {}, []
    for name, module in model.named_modules():
        place = _place(name)
        if isinstance(module, torch.jit.ScriptModule):
            if module is model or "BatchNorm" in module.original_name:
                raise ValueError(
                    f"{place} is scripted, and a scripted module cannot be changed: "
                    "convert the model first, then script it"
                )
        elif any(is_lazy(a) for a in (*module._parameters.values(), *module._buffers.values())):
            raise ValueError(
                f"{place} ({type(module).__name__}) is not initialized yet: "
                "run the model once on an input, then convert it"
            )
        elif isinstance(module, _BatchNorm):
            found[name] = module
        elif "FrozenBatchNorm" in type(module).__name__:
            frozen.append(place)
    if not found:
        raise ValueError(f"no BatchNorm in {type(model).__name__}: {_remedy(frozen)}")
    return found


def _place(name: str) -> str:
    return f"{name!r}" if name else "the model"


def _remedy(frozen: list[str]) -> str:
    if frozen:
        return (
            f"{frozen[0]} is a frozen BatchNorm with constant statistics; build the model with "
            "nn.BatchNorm2d, load its weights, and convert it with init='bn'"
        )
    return "there is nothing to convert"


def check_can_start(name: str, norm: _BatchNorm, init: str) -> None:
    """Raise ValueError if AGC cannot be initialized from this BatchNorm as requested."""
    place = f"{_place(name)} ({type(norm).__name__})"
    if init == "bn" and (norm.running_mean is None or norm.running_var is None):
        raise ValueError(
            f"{place} has no running statistics (track_running_stats=False), which init='bn' "
            "needs: use init='paper', or exclude it with `where`"
        )
    if init == "paper" and any(not p.requires_grad for p in norm.parameters(recurse=False)):
        raise ValueError(
            f"{place} is frozen (requires_grad=False), so the untrained values of init='paper' "
            "would stay forever: use init='bn', which keeps its function and keeps it frozen, or "
            "unfreeze it, or exclude it with `where`"
        )


def trailing_layers(norm: _BatchNorm) -> list[nn.Module] | None:
    """Return the layers that a BatchNorm subclass applies after normalizing.

    Some libraries put an activation or a dropout inside their BatchNorm (timm's BatchNormAct2d).
    An overridden forward counts as "normalize, then call the children in order" if it computes the
    same on a test input in eval mode.

    Returns:
        The layers, empty for a plain BatchNorm; None if the forward computes something else.
    """
    if type(norm).forward in _PLAIN_FORWARDS and "forward" not in vars(norm):
        return []
    probe = copy.deepcopy(norm).eval()
    like = next((a for a in (probe.weight, probe.running_mean) if a is not None), torch.empty(0))
    dims = next((d for d in (1, 2, 3) if isinstance(norm, getattr(nn, f"BatchNorm{d}d"))), 2)
    x = torch.linspace(-2, 2, 2 * norm.num_features * 3**dims).to(like)
    x = x.reshape(2, norm.num_features, *(3,) * dims)
    try:
        with torch.no_grad():
            expected = _BatchNorm.forward(probe, x)
            for layer in probe.children():
                expected = layer(expected)
            same = torch.allclose(probe(x), expected)
    except (RuntimeError, TypeError, ValueError):
        return None  # it takes other inputs than feature maps; the report lists it as skipped
    return [layer for layer in norm.children() if type(layer) is not nn.Identity] if same else None


def paper_parameters(norm: _BatchNorm, lam: float) -> AGCParameters:
    """Return gamma = 1, beta = 0 and the given lambda; a gamma of all zeros is kept."""
    gamma = 0.0 if has_zero_gamma(norm) else 1.0
    like = _like(norm)
    return _parameters(norm, *(like.new_full((norm.num_features,), a) for a in (gamma, 0, lam)))


def has_zero_gamma(norm: _BatchNorm) -> bool:
    """Whether gamma is 0 in all channels: residual branches start as their shortcut that way."""
    gamma = norm.weight
    return gamma is not None and not gamma.is_meta and not gamma.any()


def eval_parameters(norm: _BatchNorm) -> AGCParameters:
    """Return a BatchNorm in eval mode as Eq. 1 with lambda = 0.

    gamma' = gamma / sqrt(var + eps), beta' = beta - gamma' * mean
    """
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    gain = torch.rsqrt(var.to(accumulate_dtype(var.dtype)) + norm.eps)
    if norm.weight is not None:
        gain = gain * norm.weight
    bias = -gain * mean
    if norm.bias is not None:
        bias = bias + norm.bias
    return _parameters(norm, gain, bias, torch.zeros_like(gain))


def _parameters(norm: _BatchNorm, gain: Tensor, bias: Tensor, mean_scale: Tensor) -> AGCParameters:
    """Make parameters with the dtype and requires_grad of the BatchNorm's."""
    dtype = _like(norm).dtype

    def parameter(value: Tensor, own: Tensor | None) -> nn.Parameter:
        return nn.Parameter(value.detach().to(dtype), own is None or own.requires_grad)

    return AGCParameters(
        parameter(gain, norm.weight),
        parameter(bias, norm.bias),
        parameter(mean_scale, norm.weight),
    )


def _like(norm: _BatchNorm) -> Tensor:
    """Return a tensor of the norm's dtype and device; fp32 without parameters and buffers."""
    for a in (norm.weight, norm.running_mean):
        if a is not None:
            return a.detach()
    return torch.empty(0)
