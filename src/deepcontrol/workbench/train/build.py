"""Build a run's network from its configuration, and add its noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ...nn import (
    AGCConv2d,
    AGCConv3d,
    AGCLinear,
    DeepNoise,
    Quantile,
    TrimmedMean,
    WindowMean,
    he_init_,
    identity_init_,
    set_noise_,
)
from ...nn.init import scale_to_unit_
from ..data import BatchStream
from ..models import CUSTOM, build, build_external, is_external
from .config import Train, parse_background

UNIT_INIT_IMAGES = 4


def build_network(config: Train, num_classes: int) -> nn.Module:
    """Return the network with torch's default initialization.

    A network of another library has its own, or that of to_agc.

    Raises:
        ValueError: The name is unknown, or the network was passed to `Trainer`.
    """
    if config.model == CUSTOM:
        raise ValueError(
            f"the network of {config.out} was passed to deepcontrol.workbench.train.Trainer, so "
            "its code is unknown here: pass --model module:function, a function that builds it"
        )
    model = _build_by_name(config, num_classes)
    set_background_(model, config.background)
    return model


def _build_by_name(config: Train, num_classes: int) -> nn.Module:
    if is_external(config.model):
        return build_external(
            config.model,
            config.task,
            num_classes,
            config.norm,
            config.in_channels,
            config.image_size,
            config.pretrained,
            config.seed,
        )
    return build(
        config.model,
        num_classes,
        config.norm,
        config.width,
        in_channels=config.in_channels,
        size=config.image_size,
    )


def build_model(config: Train, num_classes: int) -> nn.Module:
    """Return the initialized network. `--init unit` also needs `scale_to_images_`."""
    init = {"he": he_init_, "identity": identity_init_, "unit": he_init_}[config.init]
    model = build_network(config, num_classes)
    if not is_external(config.model):
        init(model, torch.Generator().manual_seed(config.seed))
    if hasattr(model, "start_gains_"):
        model.start_gains_()  # type: ignore[operator]
    for neuron in model.modules():
        if isinstance(neuron, (AGCConv2d, AGCConv3d, AGCLinear)):
            fix_parameters_(neuron, config)
    if config.lambda_start is not None:
        for mean_scale in lambdas(model):
            nn.init.constant_(mean_scale, config.lambda_start)
    return model


def move_(model: nn.Module, device: torch.device) -> None:
    """Move a network to a device, on a GPU with its filters in channels_last."""
    model.to(device)
    dims = {p.dim() for p in model.parameters() if p.dim() in (4, 5)}
    if device.type == "cuda" and len(dims) == 1:
        layout = torch.channels_last if dims == {4} else torch.channels_last_3d
        model.to(memory_format=layout)  # type: ignore[call-overload]


@torch.no_grad()
def fix_parameters_(neuron: AGCConv2d | AGCConv3d | AGCLinear, config: Train) -> None:
    """Fix lambda and gamma of a neuron as the configuration says.

    The last gain of a residual branch starts below 1, which keeps the signal bounded. It is fixed
    at a multiple of that value.
    """
    if config.fixed_lambda is not None:
        neuron.mean_scale.fill_(config.fixed_lambda)
        neuron.mean_scale.requires_grad_(False)
    if config.fixed_gamma is not None:
        neuron.gain.mul_(config.fixed_gamma)
        neuron.gain.requires_grad_(False)


def scale_to_images_(model: nn.Module, config: Train, train: BatchStream) -> None:
    """Complete `--init unit`: scale the filters on the first training images.

    Call it before the model moves to a GPU, so that every device starts with the same weights.
    """
    if config.init == "unit":
        count = min(UNIT_INIT_IMAGES, len(train.dataset))
        images = train.samples(range(count)).images.cpu()
        ends = [getattr(model, name) for name in ("classify", "outline") if hasattr(model, name)]
        scale_to_unit_(model, images, ends)


# Proposals of the paper that it does not show. `deepcontrol reproduce --preset proposals` judges
# them. GEMS is a hook of the optimizer; see `start.open_run`.
#
# Noise and dropout are random numbers of torch's default generators. A checkpoint holds the state
# of these, and a captured step draws from them, so that a resumed run continues bit for bit.


PROCESSES = 2**16  # each process of a run has random numbers of its own


def set_background_(model: nn.Module, text: str) -> None:
    """Set the background of all AGC layers of a network."""
    name, value = parse_background(text)
    if name == "mean":
        return
    background = {
        "median": lambda: Quantile(0.5),
        "window": lambda: WindowMean(int(value)),
        "quantile": lambda: Quantile(value),
        "trimmed": lambda: TrimmedMean(value),
    }[name]()
    layers = [layer for layer in model.modules() if hasattr(layer, "background")]
    if not layers:
        raise ValueError(f"--background {text}: the network has no AGC layer with feature maps")
    for layer in layers:
        layer.background = background  # type: ignore[assignment]


def lambdas(model: nn.Module) -> list[nn.Parameter]:
    """Return lambda of every AGC layer."""
    return [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "mean_scale"]


def add_noise_(
    model: nn.Module, noise: float, dropout: float, seed: int, rank: int
) -> Callable[[], None]:
    """Add --noise and --dropout to a network; return a function that removes them.

    Noise is added by each AGC layer, or behind each BatchNorm. Dropout sets whole maps of the
    classifier's input to 0. Neither has parameters or acts in evaluation.

    Args:
        model: The network, changed in place.
        noise: Standard deviation, relative to that of each map; 0 for none.
        dropout: Probability; 0 for none. The network must have a layer `classify`.
        seed: Seed of the run.
        rank: Rank of this process.
    """
    if not noise and not dropout:
        return lambda: None
    torch.manual_seed((seed * PROCESSES + rank) % 2**63)
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    has_own_noise = bool(noise) and (not norms or bool(lambdas(model)))
    hooks = []
    if has_own_noise:
        set_noise_(model, noise)  # raises if there is no layer that adds noise
    if noise:
        hooks += [norm.register_forward_hook(_NoiseHook(noise)) for norm in norms]
    if dropout:
        classify: Any = model.classify
        hooks.append(classify.register_forward_pre_hook(_DropoutHook(dropout)))

    def remove() -> None:
        if has_own_noise:
            set_noise_(model, 0.0)
        for hook in hooks:
            hook.remove()

    return remove


class _NoiseHook:
    """A forward hook that adds noise while its layer trains."""

    def __init__(self, relative: float) -> None:
        self.noise = DeepNoise(relative)

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        noisy: Tensor = self.noise(output) if layer.training else output
        return noisy


class _DropoutHook:
    """A forward pre-hook that drops maps of a layer's input while the layer trains."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        if not layer.training:
            return inputs[0]
        if inputs[0].dim() == 2:  # vectors, as in classification
            return functional.dropout(inputs[0], self.probability)
        return torch.feature_dropout(inputs[0], self.probability, train=True)
