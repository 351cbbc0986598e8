"""The BatchNorms of a model: finding them, and refusing in words what cannot be converted."""

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def find_batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm of a model by its (first) name; ValueError if it cannot be converted."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("convert the model before DistributedDataParallel wraps it")
    found, frozen = {}, []
    for name, module in model.named_modules():
        place = f"{name!r}" if name else "the model"
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
        raise ValueError(f"no BatchNorm in {type(model).__name__}: {_instead(frozen)}")
    return found


def _instead(frozen: list[str]) -> str:
    if frozen:
        return (
            f"{frozen[0]} is a frozen one, whose statistics are constants; build the model with "
            "nn.BatchNorm2d, load its weights, and convert it with init='bn'"
        )
    return "there is nothing to convert"


def check_can_start(name: str, norm: _BatchNorm, init: str) -> None:
    """ValueError if AGC cannot start from this BatchNorm in the way asked for."""
    place = f"{name!r}" if name else "the model"
    if init == "bn" and (norm.running_mean is None or norm.running_var is None):
        raise ValueError(
            f"{place} ({type(norm).__name__}) has no running statistics to start from "
            "(track_running_stats=False): use init='paper', or leave it out with `where`"
        )
    if init == "paper" and any(not p.requires_grad for p in norm.parameters(recurse=False)):
        raise ValueError(
            f"{place} ({type(norm).__name__}) is frozen (requires_grad=False): init='paper' would "
            "put untrained values there for good. Use init='bn', which keeps what it computes and "
            "keeps it frozen, or unfreeze it, or leave it out with `where`"
        )


def layers_inside(norm: _BatchNorm) -> list[nn.Module] | None:
    """The layers that a subclass of BatchNorm applies after normalizing; None if it does more.

    Libraries have BatchNorms with an activation or a dropout inside (timm's BatchNormAct2d).
    A forward of its own is believed to be "normalize, then my children in their order" if that is
    what it does to an example in eval mode.
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
        return None  # it takes something else than maps: it is left alone, and the table says so
    return [layer for layer in norm.children() if type(layer) is not nn.Identity] if same else None
