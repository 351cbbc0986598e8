"""Eq. 1 and its backward on a GPU: how maps are cut, and the launches. The kernels: agc_device.py.

All the time is memory's, and a map is needed twice: for its mean, then to be rewritten. That is a
launch of sums and a launch of rewriting over the whole batch. Where a map is small, one program
does both. Finer ways to have the second read in the L2 cache (chunks of samples, programs that wait
for one another) have all cost more than they saved: LOG.md has the figures.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from ..activation import ACTIVATIONS
from ..backend import map_strides, on_device
from ..maps import like_layout, memory_order, positions
from ..open_bits import packing
from .agc_device import agc_backward_kernel, agc_filters_kernel, agc_forward_kernel, agc_sum_kernel

BLOCK = 4096  # elements that a program reads at once: with more, its registers run out
ALONE = 512  # positions of a map that one program sums and rewrites
MOST_PARTS = 256  # partial sums of a map, which every program that rewrites it adds up


@dataclass(frozen=True)
class Plan:
    """How maps are cut."""

    block_c: int  # maps in a unit
    block_p: int  # positions that a program reads at once
    part_steps: int  # how often it does, to sum a part
    tile_steps: int  # how often it does, to rewrite a tile
    alone: bool  # one program sums and rewrites a unit
    warps: int


def plan(n: int, c: int, p: int, channels_last: bool, multiprocessors: int) -> Plan:
    """The cut for N x C maps of P positions."""
    alone = p <= ALONE
    if alone:
        block_c, block_p = power_of_2(c, 16), power_of_2(p, ALONE)
    elif channels_last:
        # 64 channels of a half type are a whole line of the cache; but small maps need programs.
        small = n * c * p < 8 * multiprocessors * BLOCK
        block_c = power_of_2(c, 32 if small else 64)
        block_p = power_of_2(p, BLOCK // block_c)
    else:
        block_p = power_of_2(p, BLOCK)
        block_c = power_of_2(c, min(BLOCK // block_p, 32))
    blocks, units = divide(p, block_p), n * divide(c, block_c)
    parts = min(MOST_PARTS, blocks, divide(4 * multiprocessors, units))
    crowded = units * blocks >= 4 * multiprocessors
    return Plan(
        block_c,
        block_p,
        part_steps=divide(blocks, parts),
        tile_steps=blocks if alone else 4 if crowded else 1,
        alone=alone,
        warps=max(1, min(8, block_c * block_p // 1024)),
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(
    z: Tensor,
    gamma: Tensor | None,
    beta: Tensor,
    lam: Tensor,
    activation: str,
    out: Tensor | None = None,
    bits: Tensor | None = None,
    cut: Plan | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and the means (N, C); y is written to `out` where given, which may be z itself.

    bits, where given, are set to where the activation is open: open_bits.py.
    """
    dense = like_layout(z, memory_order(z))
    if out is not None and dense is not z:  # not laid out as the kernel will write
        y, mean = forward(dense, gamma, beta, lam, activation, None, bits, cut, traced)
        return out.copy_(y), mean
    z = dense
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    launches = Launches(z, cut, traced)
    partial = launches.partial_sums()
    parameters = dict(mean=mean, gamma=gamma, beta=beta, lam=lam, partial=partial)
    if not launches.cut.alone:
        launches.sum(
            g=z, kept=z, partial_hz=partial, **parameters, ACT="none", KEPT="nothing", TWO=False
        )
    launches.rewrite(agc_forward_kernel, z=z, y=y, bits=bits, **parameters, ACT=activation)
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
    """dz, dgamma (None without gamma), dbeta, dlam; `kept` is z, y, y's bits or nothing.

    With bits, g must have its dimensions in the order of y's in memory.
    """
    kind: str = "input" if gamma is not None else ACTIVATIONS[activation].needs
    if kept is not None and kept.dtype == torch.uint8:
        kind = "bits"
    layout = memory_order(g if kept is None or kind == "bits" else kept)
    g = like_layout(g, layout)
    if kept is None:
        kept = g
    elif kind != "bits":
        kept = like_layout(kept, layout)
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    dz, dbeta, dlam = (torch.empty_like(a) for a in (g, beta, lam))
    dgamma = None if gamma is None else torch.empty_like(gamma)
    launches = Launches(g, cut, traced)
    sums = launches.sums(mean, dgamma, dbeta, dlam)
    partial = launches.partial_sums()
    partial_hz = partial if gamma is None else launches.partial_sums()
    common = dict(
        g=g, kept=kept, mean=mean, gamma=gamma, beta=beta, lam=lam, partial=partial,
        partial_hz=partial_hz, ACT=activation, KEPT=kind, TWO=gamma is not None,
    )  # fmt: skip
    if not launches.cut.alone:
        launches.sum(**common)
    launches.rewrite(agc_backward_kernel, dz=dz, **sums, **common)
    launches.filters(sums, mean=mean, gamma=gamma, dgamma=dgamma, dbeta=dbeta, dlam=dlam)
    return dz, dgamma, dbeta, dlam


class Geometry:
    """Maps of one shape and layout, cut: how many of everything, and what each kernel is told."""

    def __init__(self, maps: Tensor, cut: Plan | None, device: torch.device) -> None:
        n, c, p = maps.shape[0], maps.shape[1], positions(maps)
        strides = map_strides(maps)
        if strides is None:
            raise ValueError(f"no kernel for strides {maps.stride()}")  # backend.py asks first
        sn, sc, sp = strides
        self.cut = cut = cut or plan(n, c, p, bool(sc == 1), _multiprocessors(device))
        self.groups = divide(c, cut.block_c)
        self.units = n * self.groups
        blocks = divide(p, cut.block_p)
        self.parts, self.tiles = divide(blocks, cut.part_steps), divide(blocks, cut.tile_steps)
        even = c % cut.block_c == 0 and p % cut.block_p == 0
        common = dict(
            C=c, P=p, groups=self.groups, parts=self.parts, sn=sn, sc=sc, sp=sp,
            PACK=packing(maps), BLOCK_P=cut.block_p, BLOCK_C=cut.block_c, num_warps=cut.warps,
            ROWS=min(cut.block_p, max(1, 256 * cut.warps // cut.block_c)),
        )  # fmt: skip
        # EVEN: without masks, where every program of the launch is full.
        self.of_sum = dict(
            common, steps=cut.part_steps, EVEN=bool(even and blocks % cut.part_steps == 0)
        )
        self.of_rewrite = dict(
            common, steps=cut.tile_steps, tiles=self.tiles, ALONE=cut.alone,
            EVEN=bool(even and blocks % cut.tile_steps == 0),
            BLOCK_T=power_of_2(self.parts, 4096 // cut.block_c),
        )  # fmt: skip


def _geometry(maps: Tensor, cut: Plan | None, traced: bool) -> Geometry:
    if traced:  # sizes may be symbols, which cannot be remembered
        return Geometry(maps, cut, maps.device)
    return _remembered(maps.shape, maps.stride(), maps.device, cut)


@functools.lru_cache(maxsize=4096)  # an eager step asks for the same ones again and again
def _remembered(
    shape: torch.Size, strides: tuple[int, ...], device: torch.device, cut: Plan | None
) -> Geometry:
    return Geometry(torch.empty_strided(shape, strides, device="meta"), cut, device)


class Launches:
    """The launches over maps (N, C, *) that are all laid out alike; traced: a compiler watches."""

    def __init__(
        self, maps: Tensor, cut: Plan | None, traced: bool, may_be_alone: bool = True
    ) -> None:
        geometry = _geometry(maps, cut, traced)
        if geometry.cut.alone and not may_be_alone:
            geometry = _geometry(maps, replace(geometry.cut, alone=False), traced)
        self.maps, self.traced, self.geometry, self.cut = maps, traced, geometry, geometry.cut
        self.units, self.groups, self.parts = geometry.units, geometry.groups, geometry.parts

    def partial_sums(self) -> Tensor:
        count = self.units * self.parts * self.cut.block_c
        return self.maps.new_empty(1 if self.cut.alone else count, dtype=torch.float32)

    def sum(self, **arguments: Any) -> None:
        self.run(agc_sum_kernel, self.units * self.parts, **self.geometry.of_sum, **arguments)

    def rewrite(self, kernel: Any, **arguments: Any) -> None:
        geometry = self.geometry
        self.run(kernel, self.units * geometry.tiles, **geometry.of_rewrite, **arguments)

    def sums(
        self, mean: Tensor, dgamma: Tensor | None, dbeta: Tensor, dlam: Tensor
    ) -> dict[str, Tensor | None]:
        """Where a backward kernel leaves the sums over maps, for `filters` to add up over samples.

        A single sample's sums are the gradients already.
        """
        if self.maps.shape[0] == 1:
            return dict(sum_h=dbeta, sum_hz=dgamma, dlam=dlam)
        sum_hz = None if dgamma is None else torch.empty_like(mean)
        return dict(sum_h=torch.empty_like(mean), sum_hz=sum_hz, dlam=None)

    def filters(self, sums: dict[str, Tensor | None], **arguments: Any) -> None:
        n, c = self.maps.shape[:2]
        if n == 1:
            return
        block_c = power_of_2(c, 32)
        self.run(
            agc_filters_kernel, divide(c, block_c), sum_h=sums["sum_h"], sum_hz=sums["sum_hz"],
            N=n, C=c, BLOCK_N=power_of_2(n, 16), BLOCK_C=block_c, num_warps=1, **arguments,
        )  # fmt: skip

    def run(self, kernel: Any, programs: int, **arguments: Any) -> None:
        with on_device(self.maps):
            (wrap_triton(kernel) if self.traced else kernel)[(programs,)](**arguments)


# Triton's own are meant for kernels and cost ten microseconds a call outside of one.
def divide(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int, most: int) -> int:
    """The next power of 2, but not more than `most`."""
    p = 1
    while p < n and p < most:
        p *= 2
    return p
