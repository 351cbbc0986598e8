"""The end of an encoder's stage on a GPU: the launches. The kernels: agc_pool_device.py."""

from typing import Any

import torch
from torch import Tensor

from ..activation import ACTIVATIONS
from ..backend import map_strides
from ..maps import like_layout, memory_order
from ..pool import is_channels_last
from ..window_mean import Origin, serves
from .agc import Launches
from .agc_pool_device import agc_pool_backward_kernel, agc_pool_forward_kernel
from .launch import divide, power_of_2
from .pool import empty_maps

BLOCK = 2048  # windows that a program reads at once over its maps, of four positions each
STEPS = 4  # how often it does


def forward(
    v: Tensor,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    totals: Tensor | None = None,
    origin: Origin | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """pooled, index and the means (N, C) of v (N, C, H, W).

    totals, of empty_totals, are set to the sums of the pooled maps; origin: as in agc.py.
    """
    v = like_layout(v, memory_order(v))
    beta, lam = beta.contiguous(), lam.contiguous()
    n, c, height, width = v.shape
    shape, last = (n, c, height // 2, width // 2), is_channels_last(v)
    pooled = empty_maps(v, shape, v.dtype, last)
    index = empty_maps(v, shape, torch.uint8, last)
    mean = v.new_empty((n, c), dtype=torch.float32)
    launches = Launches(v, None, traced, held=0, known=serves(v, origin))
    partial = launches.sums_of(v, origin)
    windows = shape[2] * shape[3]
    tiles, geometry = _tiles(launches, windows, leaves=totals is not None)
    launches.run(
        agc_pool_forward_kernel, launches.units * tiles, v=v, pooled=pooled, index=index,
        totals=totals, mean=mean, beta=beta, lam=lam, partial=partial, P=height * width,
        windows=windows, across=shape[3], width=width, ACT=activation,
        KNOWN=launches.known, **geometry, **launches.adding_up(partial),
        **_strides(v, "s"), **_strides(pooled, "o"),
    )  # fmt: skip
    return pooled, index, mean


def empty_totals(v: Tensor) -> Tensor:
    """Room for the sums of the pooled maps as `forward` leaves them: see agc.py."""
    launches = Launches(v, None, traced=False, held=0)
    tiles, _ = _tiles(launches, (v.shape[2] // 2) * (v.shape[3] // 2), leaves=True)
    shape = (v.shape[0], launches.groups, tiles, launches.cut.block_c)
    return v.new_empty(shape, dtype=torch.float32)


def backward(
    g: Tensor,
    pooled: Tensor | None,
    index: Tensor,
    beta: Tensor,
    lam: Tensor,
    mean: Tensor,
    size: tuple[int, int],
    activation: str,
    channels_last: bool,
    traced: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dv, dbeta, dlam."""
    order = memory_order(index)
    g = like_layout(g, order)
    kept = g if pooled is None else like_layout(pooled, order)
    beta, lam = beta.contiguous(), lam.contiguous()
    (n, c), (height, width) = g.shape[:2], size
    dv = empty_maps(g, (n, c, height, width), g.dtype, channels_last)
    dbeta, dlam = torch.empty_like(beta), torch.empty_like(lam)
    launches = Launches(g, None, traced, held=0)
    sums = launches.sums(mean, None, dbeta, dlam)
    partial = launches.partial_sums()
    launches.sum(
        g=g, kept=kept, mean=mean, gamma=None, beta=beta, lam=lam,
        partial=partial, partial_hz=partial, ACT=activation, KEPT=ACTIVATIONS[activation].needs,
        TWO=False,
    )  # fmt: skip
    across = divide(width, 2)
    windows = divide(height, 2) * across
    tiles, geometry = _tiles(launches, windows)
    launches.run(
        agc_pool_backward_kernel, launches.units * tiles, g=g, kept=kept, index=index, dv=dv,
        mean=mean, lam=lam, partial=partial, P=height * width, windows=windows, across=across,
        down=height // 2, right=width // 2, height=height, width=width, ACT=activation,
        sum_h=sums["sum_h"], dlam=sums["dlam"], **geometry, **launches.adding_up(partial),
        **_strides(dv, "s"), **_strides(g, "o"),
    )  # fmt: skip
    launches.filters(sums, mean=mean, gamma=None, dgamma=None, dbeta=dbeta, dlam=dlam)
    return dv, dbeta, dlam


def _tiles(launches: Launches, windows: int, leaves: bool = False) -> tuple[int, dict[str, Any]]:
    """How many tiles of windows a unit has, and what both kernels are told of the cut."""
    block_c = launches.cut.block_c
    n, c = launches.maps.shape[:2]
    block, steps = BLOCK, STEPS
    if n * c * windows < BLOCK * STEPS * launches.geometry.multiprocessors:
        block, steps = BLOCK // 2, STEPS // 2  # or some would have nothing to do
    elif leaves:
        block, steps = BLOCK // 2, STEPS * 2  # the sums take registers
    block_q = power_of_2(windows, block // block_c)
    tiles = divide(windows, steps * block_q)
    return tiles, dict(
        C=c, groups=launches.groups, tiles=tiles, steps=steps,
        BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=max(1, min(8, 4 * block_q * block_c // 1024)),
    )  # fmt: skip


def _strides(maps: Tensor, prefix: str) -> dict[str, int]:
    strides = map_strides(maps)
    assert strides is not None  # both layouts that empty_maps makes have one for the positions
    return {f"{prefix}{name}": stride for name, stride in zip("ncp", strides, strict=True)}
