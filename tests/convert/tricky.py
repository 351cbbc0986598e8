"""Small models with structures that mislead a converter, one per case."""

import functools
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.convert.networks import row


@dataclass(frozen=True)
class Case:
    """A model and its example.

    Attributes:
        make: Builds the model.
        example: Input of the model, a tuple of inputs, or a dict of keyword arguments.
        fused: BatchNorms that must still be fused with their convolution when an example is given.
        skipped: BatchNorms that stay, as the report must say.
        run: Runs the model and returns everything that a user can observe; default: its output.
        warns: Whether the conversion warns.
    """

    make: Callable[[], nn.Module]
    example: Any
    fused: int = 0
    skipped: int = 0
    run: Callable[[nn.Module], Any] | None = None
    warns: bool = False


CASES: dict[str, Case] = {}


def image() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def case(example: Callable[[], Any] = image, **expected: Any) -> Callable[[Any], Any]:
    """Register a function that builds a model."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[make.__name__] = Case(make, example(), **expected)
        return make

    return register


class Triple(nn.Module):
    """Convolution, BatchNorm, ReLU and a head; subclasses call them in tricky ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.ReLU()
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.bn(self.conv(x))))


def forward(example: Callable[[], Any] = image, **expected: Any) -> Callable[[Any], Any]:
    """Register a forward of the layers of Triple."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(function.__name__.title().replace("_", ""), (Triple,), {"forward": function})
        CASES[function.__name__] = Case(kind, example(), **expected)
        return function

    return register


# ---- the code takes another branch for a proxy


@forward(fused=1)
def plain(self: Triple, x: Tensor) -> Tensor:
    return Triple.forward(self, x)


@forward()
def isinstance_tensor(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.bn(z)
    return self.head(self.act(y + z if isinstance(x, Tensor) else y))


@forward()
def isinstance_of_the_map(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    if not isinstance(z, Tensor):
        return self.head(self.act(self.bn(z)))
    return self.head(self.act(self.bn(z.abs())))


@forward()
def type_is_tensor(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.bn(z) * z if type(z) is Tensor else self.bn(z))


@forward()
def hasattr_of_the_map(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y if hasattr(z, "decomposed_tensors") else y + z)


@forward()
def try_and_except(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    try:
        offset = float(z.detach().mean())
    except TypeError:
        return self.head(self.act(self.bn(z)))
    return self.head(self.act(self.bn(z)) + z * offset)


@forward()
def try_len(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.bn(z)
    try:
        samples = len(x)
    except (TypeError, RuntimeError):
        samples = 0
    return self.head(y + z if samples else y)


@forward()
def grad_enabled(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y if torch.is_grad_enabled() else y + z)


@forward()
def grad_disabled(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if torch.is_grad_enabled() else y)


@forward()
def requires_grad_of_the_map(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if z.requires_grad is True else y)


@forward()
def shape_is_a_tuple(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if isinstance(x.shape, tuple) else y)


@forward()
def dtype_is_float(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if x.dtype in (torch.float32, torch.float64) else y)


@forward()
def value_of_the_map(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.act(self.bn(z)) + (z if z.sum() > -1e9 else 0))


@forward()
def match_statement(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    match x:
        case Tensor():
            return self.head(self.bn(z) - z)
        case _:
            return self.head(self.bn(z))


@forward()
def scripting_branch(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y if torch.jit.is_scripting() else y + z)


@forward()
def class_name_of_the_input(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.bn(z) + (z if type(x).__name__ == "Tensor" else 0))


# ---- another use of the map in one mode or for one argument


@forward()
def only_in_training(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if self.training else y)


@forward()
def only_in_evaluation(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y if self.training else y + z)


@forward(fused=1)
def activation_in_training_only(self: Triple, x: Tensor) -> Tensor:
    y = self.bn(self.conv(x))
    return self.head(self.act(y) if self.training else y)


@forward()
def part_alone_in_training(self: Triple, x: Tensor) -> Tensor:
    y = self.head(self.act(self.bn(self.conv(x))))
    return y + self.conv(x).mean() if self.training else y


@forward()
def norm_left_out_in_training(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.act(z if self.training else self.bn(z)))


@forward(example=lambda: (image(), None, torch.ones(1)))
def optional_one_at_a_time(
    self: Triple, x: Tensor, a: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if a is None and b is not None else y)


@forward(example=lambda: {"x": image(), "mask": torch.ones(2, 1, 8, 8)})
def optional_by_keyword(
    self: Triple, x: Tensor, scale: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z * mask if mask is not None and scale is None else y)


@forward(example=lambda: (image(), True))
def flag(self: Triple, x: Tensor, features: bool = False) -> Any:
    z = self.conv(x)
    y = self.head(self.act(self.bn(z)))
    return (y, z) if features else y


@forward(example=lambda: {"x": image(), "how": "both"})
def keyword_arguments(self: Triple, x: Tensor, **options: Any) -> Tensor:
    z = self.conv(x)
    y = self.act(self.bn(z))
    return self.head(y + z if options.get("how") == "both" else y)


@forward()
def output_and_map(self: Triple, x: Tensor) -> Any:
    z = self.conv(x)
    return {"out": self.head(self.act(self.bn(z))), "maps": [z]}


@forward()
def norm_twice(self: Triple, x: Tensor) -> Tensor:
    return self.head(self.act(self.bn(self.bn(self.conv(x)))))


@forward(fused=1)
def activation_also_elsewhere(self: Triple, x: Tensor) -> Tensor:
    return self.head(self.act(self.bn(self.conv(self.act(x)))))


@forward()
def in_place_between(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    y = self.bn(z)
    if not self.training:  # BatchNorm saves its input for the backward
        z.add_(1)
    return self.head(self.act(y) + z)


@forward(fused=1)
def in_place_after_the_norm(self: Triple, x: Tensor) -> Tensor:
    y = self.bn(self.conv(x))
    y += 1
    return self.head(self.act(y))


@forward()
def detached_map(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.act(self.bn(z)) + z.detach())


@forward()
def map_of_half_the_batch(self: Triple, x: Tensor) -> Tensor:
    z = self.conv(x)
    return self.head(self.act(self.bn(z[:1])))


# ---- maps that are kept


@forward(run=lambda m: (m(CASES["kept_in_an_attribute"].example), m.feature))
def kept_in_an_attribute(self: Triple, x: Tensor) -> Tensor:
    self.feature = self.conv(x)
    return self.head(self.act(self.bn(self.feature)))


@forward(run=lambda m: (m(CASES["kept_before_the_activation"].example), m.feature), fused=1)
def kept_before_the_activation(self: Triple, x: Tensor) -> Tensor:
    self.feature = self.bn(self.conv(x))
    return self.head(self.act(self.feature))


@case(run=lambda m: (m(CASES["kept_in_a_list"].example), m.features[-1]))
def kept_in_a_list() -> nn.Module:
    class Keeps(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.features: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            self.features.append(z)
            return self.head(self.act(self.bn(z)))

    return Keeps()


@case(run=lambda m: (m(CASES["kept_by_another_module"].example), m.log.kept))
def kept_by_another_module() -> nn.Module:
    class Log(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            self.kept = z
            return z

    class Logged(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.log = Log()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.bn(self.log(self.conv(x)))))

    return Logged()


# ---- layers reached without being looked up by their registered name


@case(fused=1)
def plain_list() -> nn.Module:
    class Listed(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.steps = [self.conv, self.bn, self.act, self.head]

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    return Listed()


@case(fused=1)
def plain_dict() -> nn.Module:
    class Named(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.steps = {"first": (self.conv, self.bn), "then": (self.act, self.head)}

        def forward(self, x: Tensor) -> Tensor:
            for steps in self.steps.values():
                for step in steps:
                    x = step(x)
            return x

    return Named()


@case(fused=1)
def closure_over_layers() -> nn.Module:
    class Closure(Triple):
        def __init__(self) -> None:
            super().__init__()
            conv, bn = self.conv, self.bn
            self.begin = lambda x: bn(conv(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.begin(x)))

    return Closure()


@case(fused=1)
def closure_over_self() -> nn.Module:
    class Closure(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.begin = lambda x: self.bn(self.conv(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.begin(x)))

    return Closure()


@case(fused=1)
def partial_over_layers() -> nn.Module:
    class Partial(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = functools.partial(self.call, self.bn)

        @staticmethod
        def call(layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.normalize(self.conv(x))))

    return Partial()


@case(fused=1)
def default_argument() -> nn.Module:
    class Default(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = lambda x, layer=self.bn: layer(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.normalize(self.conv(x))))

    return Default()


@case(skipped=1, warns=True)
def object_with_slots() -> nn.Module:
    class Holder:
        __slots__ = ("layer",)

        def __init__(self, layer: nn.Module) -> None:
            self.layer = layer

    class Held(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder(self.bn)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.holder.layer(self.conv(x))))

    return Held()


@case(fused=1)
def plain_object() -> nn.Module:
    class Held(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.holder = types.SimpleNamespace(layer=self.bn)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.holder.layer(self.conv(x))))

    return Held()


_GLOBAL: dict[int, nn.Module] = {}


@case(skipped=1, warns=True)
def global_dictionary() -> nn.Module:
    class Global(Triple):
        def __init__(self) -> None:
            super().__init__()
            _GLOBAL[0] = self.bn

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(_GLOBAL[0](self.conv(x))))

    return Global()


@case(fused=1)
def weak_reference() -> nn.Module:
    class Weak(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.parent = weakref.ref(self)

        def forward(self, x: Tensor) -> Tensor:
            me = self.parent()
            assert me is not None
            return self.head(self.act(me.bn(me.conv(x))))

    return Weak()


@case(fused=1)
def bound_method() -> nn.Module:
    class Bound(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.begin = self.first

        def first(self, x: Tensor) -> Tensor:
            return self.bn(self.conv(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.begin(x)))

    return Bound()


@case()
def bound_call_of_the_norm() -> nn.Module:
    class Bound(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = self.bn.__call__

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.normalize(self.conv(x))))

    return Bound()


@case()
def bound_forward_of_the_norm() -> nn.Module:
    class Bound(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.normalize = self.bn.forward

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.normalize(self.conv(x))))

    return Bound()


@forward()
def forward_called_directly(self: Triple, x: Tensor) -> Tensor:
    return self.head(self.act(self.bn.forward(self.conv.forward(x))))


@case(skipped=1)
def unregistered_norm() -> nn.Module:
    """A BatchNorm that is no submodule stays, because it has no name; the report lists it."""

    class Hidden(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.BatchNorm2d(4).eval()]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](super().forward(x))

    return Hidden()


# ---- models that cannot be deep-copied


class Locked(Triple):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@case(fused=1)
def lock() -> nn.Module:
    return Locked()


@case()
def lock_and_two_modes() -> nn.Module:
    class Modes(Locked):
        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            y = self.act(self.bn(z))
            return self.head(y if self.training else y + z)

    return Modes()


@case(fused=1)
def lock_and_cache() -> nn.Module:
    class Caching(Locked):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Any] = {"lock": threading.Lock()}

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.cache["last"] = y
            return y

    return Caching()


@case(fused=1)
def tensor_of_a_graph() -> nn.Module:
    """A tensor that autograd computed cannot be copied by copy.deepcopy."""
    model = Triple()
    model.computed = model.conv.weight * 2
    return model


@case(fused=1)
def generator_attribute() -> nn.Module:
    model = Triple()
    model.numbers = (i for i in range(9))
    return model


@case(fused=1)
def cached_positions() -> nn.Module:
    class Caching(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[Any, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if "grid" not in self.cache:
                self.cache["grid"] = torch.ones_like(x)
            return super().forward(x + self.cache["grid"])

    return Caching()


@case(fused=1)
def counter_buffer() -> nn.Module:
    class Counting(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    return Counting()


# ---- hooks


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


# ---- instances that differ from their class


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


# ---- code that reads the layers


@forward(skipped=1, warns=True)
def reads_gamma(self: Triple, x: Tensor) -> Tensor:
    return self.head(self.act(self.bn(self.conv(x))) + self.bn.weight.abs().sum())


@forward()
def reads_the_filters(self: Triple, x: Tensor) -> Tensor:
    return self.head(self.act(self.bn(self.conv(x)))) + self.conv.weight.square().sum()


@forward()
def reads_the_filters_without_torch(self: Triple, x: Tensor) -> Tensor:
    scale = float(self.conv.weight.detach().abs().max())
    return self.head(self.act(self.bn(self.conv(x)))) * scale


@forward(skipped=1, warns=True)
def reads_running_statistics(self: Triple, x: Tensor) -> Tensor:
    y = self.bn(self.conv(x))
    return self.head(self.act(y) + self.bn.running_mean.sum())


@forward(skipped=1, warns=True)
def functional_batch_norm(self: Triple, x: Tensor) -> Tensor:
    bn = self.bn
    y = functional.batch_norm(
        self.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, bn.eps
    )
    return self.head(self.act(y))


@forward()
def functional_convolution(self: Triple, x: Tensor) -> Tensor:
    z = functional.conv2d(x, self.conv.weight, padding=1)
    return self.head(self.act(self.bn(z)))


@forward()
def isinstance_of_the_norm(self: Triple, x: Tensor) -> Tensor:
    y = self.act(self.bn(self.conv(x)))
    return self.head(y if isinstance(self.bn, nn.Identity) else y * 2)


@forward(skipped=1, warns=True)
def isinstance_batchnorm(self: Triple, x: Tensor) -> Tensor:
    y = self.act(self.bn(self.conv(x)))
    return self.head(y * 2 if isinstance(self.bn, nn.BatchNorm2d) else y)


@forward(skipped=1, warns=True)
def tracks_statistics(self: Triple, x: Tensor) -> Tensor:
    y = self.act(self.bn(self.conv(x)))
    return self.head(y * 2 if getattr(self.bn, "track_running_stats", False) else y)


@forward()
def bias_of_the_convolution(self: Triple, x: Tensor) -> Tensor:
    y = self.act(self.bn(self.conv(x)))
    return self.head(y if self.conv.bias is None else y + self.conv.bias.sum())


@case()
def filters_shared_by_name() -> nn.Module:
    class Tied(Triple):
        def __init__(self) -> None:
            super().__init__()
            self.filters = [self.conv.weight]

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.bn(self.conv(x)))
            return self.head(y + functional.conv2d(x, self.filters[0], padding=1))

    return Tied()


# ---- parameters


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


# ---- calls


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
    class Warning(Triple):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.warn("deprecated", stacklevel=2)
            return super().forward(x)

    return Warning()


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
