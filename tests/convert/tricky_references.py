"""Layers that are reached through references, kept maps, and models that are hard to copy."""

import functools
import threading
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tests.convert.tricky import CASES, Triple, case, forward

# Maps that are kept


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


# Layers reached without being looked up by their registered name


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


# Models that cannot be deep-copied


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
