"""Eq. 1 and its backward on a GPU: how maps are cut, and the launch. The kernels: agc_device.py."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from ..activation import ACTIVATIONS
from ..backend import map_strides, on_device
from ..maps import like_layout, memory_order, positions
from .agc_device import backward_kernel, forward_kernel

BLOCK = 8192  # elements that a program reads at once: with more, its registers run out


@dataclass(frozen=True)
class Plan:
    """How a launch cuts its maps."""

    block_c: int  # maps in a unit
    block_p: int  # positions that a program reads at once
    steps: int  # how often it does, for one tile
    warps: int
    patience: int = 1 << 16  # looks, of about a microsecond


def plan(n: int, c: int, p: int, channels_last: bool, room: int) -> Plan:
    """The cut for N x C maps of P positions on a device with room for so many waiting programs."""
    if channels_last:  # 64 channels of a half type are a line of the cache, 32 are half of one
        wide = p >= 8192 and n * c >= 8 * 64  # large maps, and several units to overlap
        block_c = _power_of_2(c, 64 if wide else 32)
        block_p = _power_of_2(p, BLOCK // block_c)
    else:
        block_p = _power_of_2(p, BLOCK)
        block_c = _power_of_2(c, min(BLOCK // block_p, 32))
    blocks = _divide(p, block_p)
    steps = max(min(4, blocks), _divide(blocks, room))
    return Plan(block_c, block_p, steps, warps=max(1, min(8, block_c * block_p // 1024)))


_remembered_plan = functools.cache(plan)  # an eager step asks for the same ones again and again


@functools.cache
def room(device: torch.device) -> int:
    """How many programs of a unit may wait for each other: two on each multiprocessor."""
    if device.type != "cuda":
        return 1 << 20  # Triton's interpreter runs them one by one, and they lose patience
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    z: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    out: Tensor | None = None,
    cut: Plan | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and the means (N, C); y is written to `out` where given, which may be z itself."""
    z = like_layout(z, memory_order(z))
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    _launch(
        forward_kernel, z, cut, traced, sums=1, z=z, y=y, mean=mean, gamma=gamma, beta=beta,
        lam=lam, ACT=activation,
    )  # fmt: skip
    return y, mean


def backward(
    g: Tensor,
    kept: Tensor | None,
    mean: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    cut: Plan | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dz, dgamma (None without gamma), dbeta, dlam; `kept` is z, y or nothing: see KEPT."""
    kind = "input" if gamma is not None else ACTIVATIONS[activation].needs
    layout = memory_order(g if kept is None else kept)
    g = like_layout(g, layout)
    kept = g if kept is None else like_layout(kept, layout)
    dz, dbeta, dlam, means_h = (torch.empty_like(a) for a in (g, beta, lam, mean))
    dgamma, means_hz = None, means_h
    if gamma is not None:
        dgamma, means_hz = torch.empty_like(gamma), torch.empty_like(mean)
    _launch(
        backward_kernel, g, cut, traced, sums=1 if gamma is None else 2, g=g, kept=kept, dz=dz,
        mean=mean, gamma=gamma, beta=beta, lam=lam, dgamma=dgamma, dbeta=dbeta, dlam=dlam,
        means_h=means_h, means_hz=means_hz, ACT=activation, KEPT=kind,
        BLOCK_N=_power_of_2(g.shape[0], 16),
    )  # fmt: skip
    return dz, dgamma, dbeta, dlam


def _launch(
    kernel: Any, maps: Tensor, cut: Plan | None, traced: bool, *, sums: int, **arguments: Any
) -> None:
    """Run a kernel that takes `sums` sums of each of the maps; traced: a compiler watches."""
    n, c, p = maps.shape[0], maps.shape[1], positions(maps)
    strides = map_strides(maps)
    if strides is None:
        raise ValueError(f"no kernel for maps of strides {maps.stride()}")  # backend.py asks first
    sn, sc, sp = strides
    if cut is None:
        cut = (plan if traced else _remembered_plan)(n, c, p, bool(sc == 1), room(maps.device))
    groups = _divide(c, cut.block_c)
    units, tiles = n * groups, _divide(p, cut.steps * cut.block_p)
    alone = bool(tiles == 1)
    counters = maps.new_zeros(2 * units + groups, dtype=torch.int32)
    partial = maps.new_empty(
        1 if alone else sums * units * tiles * cut.block_c, dtype=torch.float32
    )
    run = wrap_triton(kernel) if traced else kernel
    with on_device(maps):
        run[(units * tiles,)](
            **arguments,
            partial=partial,
            arrivals=counters,
            known=counters[units:],
            closed=counters[2 * units :],
            N=n,
            C=c,
            P=p,
            units=units,
            groups=groups,
            tiles=tiles,
            steps=cut.steps,
            sn=sn,
            sc=sc,
            sp=sp,
            patience=cut.patience if maps.is_cuda else 0,
            ALONE=alone,
            BLOCK_P=cut.block_p,
            BLOCK_C=cut.block_c,
            ROWS=min(cut.block_p, max(1, 256 * cut.warps // cut.block_c)),
            EVEN=bool(p % (cut.steps * cut.block_p) == 0 and c % cut.block_c == 0),
            BLOCK_T=_power_of_2(tiles, max(1, 4096 // cut.block_c)),
            num_warps=cut.warps,
        )


# Triton's own are meant for kernels and cost ten microseconds a call outside of one.
def _divide(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int, most: int) -> int:
    """The next power of 2, but not more than `most`."""
    p = 1
    while p < n and p < most:
        p *= 2
    return p
