"""Forwards that take other branches, or use a map twice."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.convert.tricky import Triple, case, forward, image

# The code takes another branch for a proxy


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


# Another use of the map in one mode or for one argument


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


# Code that reads the layers


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
