"""Hooks, patched instances, parameters that are not plain, and unusual calls."""

import functools
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.convert.networks import row
from tests.convert.tricky import CASES, Triple, case, forward

# Hooks


def observed(name: str, hooked: str) -> Callable[[nn.Module], Any]:
    """Return a run that also returns the output which a hook on a module sees."""

    def run(model: nn.Module) -> Any:
        seen: list[Tensor] = model.seen  # type: ignore[assignment]
        seen.clear()
        y = model(CASES[name].example)
        assert seen, f"the hook on {hooked} did not run"
        return y, list(seen)

    return run


def hooked_triple(where: str, pre: bool = False) -> Triple:
    """A Triple in which a hook keeps the output (or the input) of a module."""
    model = Triple()
    model.between = nn.Identity()
    seen: list[Tensor] = []
    model.seen = seen
    kind = type(model)
    if where == "between":

        class Between(Triple):
            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.act(self.between(self.bn(self.conv(x)))))

        kind = Between
    model.__class__ = kind
    layer = model.get_submodule(where)
    if pre:
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    else:
        layer.register_forward_hook(lambda m, args, out: seen.append(out))
    return model


@case(run=observed("hook_on_the_convolution", "conv"))
def hook_on_the_convolution() -> nn.Module:
    return hooked_triple("conv")


@case(run=observed("hook_on_the_norm", "bn"))
def hook_on_the_norm() -> nn.Module:
    return hooked_triple("bn")


@case(run=observed("pre_hook_on_the_norm", "bn"))
def pre_hook_on_the_norm() -> nn.Module:
    return hooked_triple("bn", pre=True)


@case(fused=1, run=observed("hook_on_the_activation", "act"))
def hook_on_the_activation() -> nn.Module:
    return hooked_triple("act")


@case(fused=1, run=observed("hook_on_an_identity", "between"))
def hook_on_an_identity() -> nn.Module:
    return hooked_triple("between")


@case()
def hook_that_changes_the_map() -> nn.Module:
    model = Triple()
    model.bn.register_forward_hook(lambda m, args, out: out * 2)
    return model


@case(run=observed("hook_on_a_wrapper", "conv"))
def hook_on_a_wrapper() -> nn.Module:
    model = hooked_triple("head")
    model.head._forward_hooks.clear()
    model.conv = nn.Sequential(model.conv)  # type: ignore[assignment]
    model.conv.register_forward_hook(lambda m, args, out: model.seen.append(out))
    return model


@case(fused=1, run=observed("hook_on_a_block", "conv"))
def hook_on_a_block() -> nn.Module:
    model = hooked_triple("head")
    model.head._forward_hooks.clear()
    model.conv = nn.Sequential(model.conv, model.bn)  # type: ignore[assignment]
    model.bn = nn.Identity()  # type: ignore[assignment]
    model.conv.register_forward_hook(lambda m, args, out: model.seen.append(out))
    return model


@case(run=lambda m: m(CASES["feature_hooks_in_the_model"].example))
def feature_hooks_in_the_model() -> nn.Module:
    """The model returns what its own hooks collect, as timm's FeatureHookNet."""

    class Collect:
        def __init__(self, layers: list[nn.Module]) -> None:
            self.found: list[Tensor] = []
            for layer in layers:
                layer.register_forward_hook(functools.partial(self.add, "feature"))

        def add(self, name: str, module: nn.Module, args: Any, out: Tensor) -> None:
            self.found.append(out)

    class Hooked(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.collect = Collect([self.bn, self.act])

        def forward(self, x: Tensor) -> list[Tensor]:
            y = super().forward(x)
            found = [y, *self.collect.found]
            self.collect.found.clear()
            return found

    return Hooked()


# Instances that differ from their class


@case()
def patched_conv_forward() -> nn.Module:
    model = Triple()
    own = model.conv._conv_forward
    model.conv._conv_forward = lambda x, w, b: own(x, w - w.mean(), b)  # type: ignore[method-assign]
    return model


@case()
def patched_forward_of_the_convolution() -> nn.Module:
    model = Triple()
    own = model.conv.forward
    model.conv.forward = lambda x: own(x).abs()  # type: ignore[method-assign]
    return model


@case(skipped=1, warns=True)
def patched_forward_of_the_norm() -> nn.Module:
    model = Triple()
    own = model.bn.forward
    model.bn.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    return model


@case(fused=1)
def patched_forward_of_the_norm_that_is_plain() -> nn.Module:
    model = Triple()
    own = model.bn.forward
    model.bn.forward = lambda x: own(x)  # type: ignore[method-assign]
    return model


@case()
def patched_forward_of_the_model() -> nn.Module:
    model = Triple()

    def patched(self: Triple, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.head(self.bn(z) + z)

    model.forward = types.MethodType(patched, model)  # type: ignore[method-assign]
    return model


@case()
def wrapped_forward_of_the_model() -> nn.Module:
    model = Triple()
    own = model.forward
    model.forward = lambda x: own(x * 2)  # type: ignore[method-assign]
    return model


@case(fused=1)
def patched_activation() -> nn.Module:
    model = Triple()
    model.act.forward = lambda x: x.clamp(-1, 1)  # type: ignore[method-assign]
    return model


@case()
def subclass_with_its_own_call() -> nn.Module:
    class Doubled(nn.Conv2d):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    model = Triple()
    model.conv = Doubled(3, 8, 3, padding=1)
    return model


# Parameters


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@case(fused=1)
def parametrized_gamma() -> nn.Module:
    model = Triple()
    parametrize.register_parametrization(model.bn, "weight", Doubled())
    return model


@case()
def pruned_gamma() -> nn.Module:
    model = Triple()
    prune.random_unstructured(model.bn, "weight", 0.5)
    return model


@case()
def pruned_filters() -> nn.Module:
    model = Triple()
    prune.random_unstructured(model.conv, "weight", 0.5)
    return model


@case(fused=2)
def tied_gammas() -> nn.Module:
    model = nn.Sequential(row(3, 8), row(8, 8))
    model[1][1].weight = model[0][1].weight
    return model


@case(fused=1)
def frozen_network() -> nn.Module:
    model = Triple()
    model.bn = nn.BatchNorm2d(8, affine=False)
    return model.requires_grad_(False)


@case(fused=1)
def without_affine() -> nn.Module:
    model = Triple()
    model.bn = nn.BatchNorm2d(8, affine=False)
    return model


@case(fused=3)
def tied_filters() -> nn.Module:
    model = nn.Sequential(row(3, 8), row(8, 8), row(8, 8))
    model[2][0].weight = model[1][0].weight
    return nn.Sequential(model[0], model[1], nn.Sequential(*model[2]))


@case(fused=1)
def gamma_of_zero() -> nn.Module:
    model = Triple()
    nn.init.zeros_(model.bn.weight)
    return model


# Calls


@forward(fused=1)
def checkpointed(self: Triple, x: Tensor) -> Tensor:
    return self.head(checkpoint(lambda x: self.act(self.bn(self.conv(x))), x, use_reentrant=False))


@case(fused=1)
def random_depth() -> nn.Module:
    class Random(Triple):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 0 if self.training and random.random() < 0.5 else y

    return Random()


@case(fused=1)
def dropout_between() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.BatchNorm2d(8), nn.ReLU(), *row(8, 4)
    )


@case(fused=2)
def recurrent_block() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = row(3, 8), row(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.again(x) + x
            return x

    return Recurrent()


@case()
def same_norm_for_two_convolutions() -> nn.Module:
    class Shared(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bn(self.conv(x)) + self.bn(self.other(x)))

    return Shared()


@case(fused=1)
def not_reached() -> nn.Module:
    class Partly(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.idle = row(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[-1] < 100 else self.idle(x)

    return Partly()


@case(example=lambda: (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)), fused=1)
def two_inputs() -> nn.Module:
    class Siamese(Triple):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a) - super().forward(b)

    return Siamese()


@case(fused=1)
def data_class_output() -> nn.Module:
    @dataclass
    class Output:
        logits: Tensor

    class Structured(Triple):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    return Structured()


@case()
def hidden_in_a_data_class() -> nn.Module:
    @dataclass
    class Output:
        logits: Tensor
        features: list[Tensor]

    class Structured(Triple):
        def forward(self, x: Tensor) -> Any:
            z = self.conv(x)
            return Output(self.head(self.act(self.bn(z))), [z])

    return Structured()


@case(fused=2)
def norms_without_statistics_among_others() -> nn.Module:
    return nn.Sequential(*row(3, 8), *row(8, 8), nn.InstanceNorm2d(8))


@case(fused=1)
def nested_in_a_sequential_slice() -> nn.Module:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*row(3, 8), nn.Conv2d(8, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2:](self.layers[:2](x))

    return Sliced()


@case(fused=1)
def warns_in_forward() -> nn.Module:
    class Warns(Triple):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("deprecated", stacklevel=2)
            return super().forward(x)

    return Warns()


@case()
def fails_in_training_mode() -> nn.Module:
    """A model that needs targets in training mode, as torchvision's detectors."""

    class Detector(Triple):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("targets should not be none when in training mode")
            return super().forward(x)

    return Detector()


@case(fused=1)
def channels_last() -> nn.Module:
    return Triple().to(memory_format=torch.channels_last)
