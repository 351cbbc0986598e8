"""Deep noise: Gaussian noise in training, relative to the level of each map.

    y = act( u + noise * std(u) * e )        u = gamma * (z - lambda * mean(z)) + beta, e ~ N(0, 1)

The paper conjectures that BatchNorm regularizes because minibatch statistics inject noise into
every layer, and proposes "deep layer-wise noise injection independent of the dataset or minibatch
size". std(u) is the standard deviation over the positions of one map, per sample and filter. It is
detached: the noise follows the level of a map, and no gradient rewards a smaller level.

The noise comes from torch's default generator of the device. It repeats under torch.manual_seed,
continues after a resume that restores the generator's state, is recomputed by activation
checkpointing (preserve_rng_state, the default), and differs in every replay of a CUDA graph.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def deep_noise(u: Tensor, relative: float) -> Tensor:
    """Add Gaussian noise of standard deviation relative * std(u) to maps u (N, C, *).

    Args:
        u: Feature maps, or features (N, C), which count as one map.
        relative: Standard deviation of the noise, relative to that of each map.

    >>> u = torch.randn(1, 1, 100, 100)
    >>> round((deep_noise(u, 0.5) - u).std().item(), 1)
    0.5
    """
    dims = tuple(range(2, u.dim())) if u.dim() > 2 else (-1,)
    with torch.no_grad():
        # torch sums half types in fp32. A map of one position has no spread and gets no noise.
        level = torch.std(u, dims, correction=0, keepdim=True)
        noise = torch.randn_like(u).mul_(relative * level)
    return u + noise


class HasNoise:
    """Mixin for layers with a `noise`. List it before the nn.Module base.

    `is_noisy` is for branches: torch.compile treats a float attribute as a variable, and comparing
    it would compile a model twice.
    """

    _noise = 0.0
    is_noisy = False

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, relative to that of each map."""
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._noise = check_noise(value)
        self.is_noisy = self._noise != 0


class DeepNoise(nn.Module):
    """Gaussian noise relative to each map's own level; the identity in eval mode.

    AGC layers with `noise` add the same noise before their activation. For a network with another
    norm, put this module between norm and activation:

        nn.Sequential(nn.Conv2d(...), nn.BatchNorm2d(64), DeepNoise(0.1), nn.ReLU())

    Args:
        relative: Standard deviation of the noise, relative to the standard deviation over the
            positions of each sample's map. 0 switches it off.

    Shape:
        (N, C, *) -> the same. Features (N, C) count as one map per sample.

    Reference:
        Ruff, "Deep Control", 2017, https://arxiv.org/abs/1706.03907, section 1.

    >>> layer, x = DeepNoise(0.1), torch.randn(1, 8, 4, 4)
    >>> torch.equal(layer(x), x), torch.equal(layer.eval()(x), x)
    (False, True)
    """

    def __init__(self, relative: float) -> None:
        super().__init__()
        self.relative = check_noise(relative)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.relative == 0:
            return input
        return deep_noise(input, self.relative)

    def extra_repr(self) -> str:
        return f"{self.relative:g}"


def check_noise(noise: float) -> float:
    """Return `noise`; raise ValueError if it is negative or not finite.

    It is a relative standard deviation.
    """
    if not 0 <= noise < float("inf"):
        raise ValueError(f"noise must be a finite number of at least 0, got {noise}")
    return float(noise)


def set_noise_(model: M, noise: float) -> M:
    """Set the noise of all AGC layers and DeepNoise modules of a model, in place.

    A captured step (TrainingStep) does not notice the change: call its reset().

    Args:
        model: A model with AGC layers or DeepNoise modules.
        noise: Relative standard deviation; 0 switches the noise off.

    Returns:
        The same model.

    Raises:
        ValueError: If no layer of the model can add noise.

    >>> from deepcontrol import AGCConv2d
    >>> set_noise_(nn.Sequential(AGCConv2d(3, 8, 3)), 0.1)[0].noise
    0.1
    """
    noise = check_noise(noise)
    found = False
    for module in model.modules():
        if isinstance(module, DeepNoise):
            module.relative, found = noise, True
        elif isinstance(getattr(module, "noise", None), float) and hasattr(module, "mean_scale"):
            module.noise, found = noise, True  # type: ignore[assignment]
    if not found:
        raise ValueError(
            f"no layer of {type(model).__name__} adds noise: expected AGC layers, or DeepNoise "
            "modules after the norms. Convert the model with to_agc, or insert DeepNoise"
        )
    return model
