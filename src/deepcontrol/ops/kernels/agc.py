"""Eq. 1 and its backward on a GPU: how maps are cut, and the launches. The kernels: agc_device.py.

All the time is memory's, and a map is needed twice: for its mean, then to be rewritten. So the
second read must find it in the L2 cache. A large batch is done in chunks of samples that fit there,
a launch of sums and a launch of rewriting for each. The last chunk comes first: it is what the
convolution before has just written, and is in the cache still; and what the convolution after reads
first is then what was written here last.
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
from .agc_device import agc_backward_kernel, agc_filters_kernel, agc_forward_kernel, agc_sum_kernel

BLOCK = 8192  # elements that a program reads at once: with more, its registers run out
MOST_PARTS = 128  # partial sums of a map, which every program that rewrites it adds up


@dataclass(frozen=True)
class Device:
    """What decides how maps are cut."""

    multiprocessors: int
    cache: int  # bytes of L2


@dataclass(frozen=True)
class Plan:
    """How maps are cut."""

    block_c: int  # maps in a unit
    block_p: int  # positions that a program reads at once
    part_steps: int  # how often it does, to sum a part
    tile_steps: int  # how often it does, to rewrite a tile
    chunk: int  # samples at a time
    alone: bool  # one program sums and rewrites a unit
    warps: int


def plan(n: int, c: int, p: int, channels_last: bool, bytes_read: int, device: Device) -> Plan:
    """The cut for N x C maps of P positions, with `bytes_read` for each element."""
    if channels_last:  # 32 channels of a half type are 64 bytes, a whole access to memory
        block_c = power_of_2(c, 32)
        block_p = power_of_2(p, BLOCK // block_c)
    else:
        block_p = power_of_2(p, BLOCK)
        block_c = power_of_2(c, min(BLOCK // block_p, 32))
    blocks = divide(p, block_p)
    alone = bool(blocks <= 2)
    chunk = n if alone else max(1, min(n, 3 * device.cache // 4 // (c * p * bytes_read)))
    units = chunk * divide(c, block_c)
    parts = min(MOST_PARTS, blocks, divide(4 * device.multiprocessors, units))
    return Plan(
        block_c,
        block_p,
        part_steps=divide(blocks, parts),
        tile_steps=blocks if alone else 4,
        chunk=chunk,
        alone=alone,
        warps=max(1, min(8, block_c * block_p // 1024)),
    )


_remembered_plan = functools.cache(plan)  # an eager step asks for the same ones again and again


@functools.cache
def _device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(multiprocessors=1, cache=1 << 20)  # Triton's interpreter
    about = torch.cuda.get_device_properties(device)
    return Device(about.multi_processor_count, about.L2_cache_size)


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
    dense = like_layout(z, memory_order(z))
    if out is not None and dense is not z:  # not laid out as the kernel will write
        y, mean = forward(dense, gamma, beta, lam, activation, None, cut, traced)
        return out.copy_(y), mean
    z = dense
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    launches = Launches(z, z.element_size(), cut, traced)
    partial = launches.partial_sums()
    parameters = dict(mean=mean, gamma=gamma, beta=beta, lam=lam, partial=partial)
    for first_unit, units in launches.chunks():
        if not launches.cut.alone:
            launches.sum(
                first_unit, units, g=z, kept=z, partial_hz=partial, **parameters,
                ACT="none", KEPT="nothing", TWO=False,
            )  # fmt: skip
        launches.rewrite(
            agc_forward_kernel, first_unit, units, z=z, y=y, **parameters, ACT=activation
        )
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
    size = g.element_size() + (0 if kept is None else kept.element_size())
    kept = g if kept is None else like_layout(kept, layout)
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    dz, dbeta, dlam, sum_h = (torch.empty_like(a) for a in (g, beta, lam, mean))
    dgamma, sum_hz = None, sum_h
    if gamma is not None:
        dgamma, sum_hz = torch.empty_like(gamma), torch.empty_like(mean)
    launches = Launches(g, size, cut, traced)
    partial = launches.partial_sums()
    partial_hz = partial if gamma is None else launches.partial_sums()
    common = dict(
        g=g, kept=kept, mean=mean, gamma=gamma, beta=beta, lam=lam, partial=partial,
        partial_hz=partial_hz, ACT=activation, KEPT=kind, TWO=gamma is not None,
    )  # fmt: skip
    for first_unit, units in launches.chunks():
        if not launches.cut.alone:
            launches.sum(first_unit, units, **common)
        launches.rewrite(
            agc_backward_kernel, first_unit, units, dz=dz, sum_h=sum_h, sum_hz=sum_hz, **common
        )
    launches.filters(
        sum_h=sum_h, sum_hz=sum_hz, mean=mean, gamma=gamma, dgamma=dgamma, dbeta=dbeta, dlam=dlam
    )
    return dz, dgamma, dbeta, dlam


class Launches:
    """The launches over maps (N, C, *) that are all laid out alike; traced: a compiler watches."""

    def __init__(
        self,
        maps: Tensor,
        bytes_read: int,
        cut: Plan | None,
        traced: bool,
        may_be_alone: bool = True,
    ) -> None:
        n, c, p = maps.shape[0], maps.shape[1], positions(maps)
        strides = map_strides(maps)
        if strides is None:
            raise ValueError(f"no kernel for strides {maps.stride()}")  # backend.py asks first
        sn, sc, sp = strides
        if cut is None:
            find = plan if traced else _remembered_plan
            cut = find(n, c, p, bool(sc == 1), bytes_read, _device(maps.device))
        if cut.alone and not may_be_alone:
            cut = replace(cut, alone=False)
        self.maps, self.cut, self.traced = maps, cut, traced
        self.groups = divide(c, cut.block_c)
        blocks = divide(p, cut.block_p)
        self.parts, self.tiles = divide(blocks, cut.part_steps), divide(blocks, cut.tile_steps)
        even = c % cut.block_c == 0 and p % cut.block_p == 0
        self.geometry = dict(
            C=c, P=p, groups=self.groups, parts=self.parts, sn=sn, sc=sc, sp=sp,
            BLOCK_P=cut.block_p, BLOCK_C=cut.block_c, num_warps=cut.warps,
            ROWS=min(cut.block_p, max(1, 256 * cut.warps // cut.block_c)),
        )  # fmt: skip
        # Without masks, where every program of the launch is full.
        self.even_parts = bool(even and blocks % cut.part_steps == 0)
        self.even_tiles = bool(even and blocks % cut.tile_steps == 0)

    def chunks(self) -> list[tuple[int, int]]:
        """(first unit, units) of each chunk of samples, the last one first.

        Eager mode gets all in one: there a launch costs more time than the cache saves. The plan is
        the same, and so are the results, to the bit.
        """
        n, size = self.maps.shape[0], self.cut.chunk
        cheap = self.traced or not self.maps.is_cuda or torch.cuda.is_current_stream_capturing()
        if not cheap:
            return [(0, n * self.groups)]
        starts = range(0, n, size)
        return [(s * self.groups, min(size, n - s) * self.groups) for s in reversed(starts)]

    def partial_sums(self) -> Tensor:
        count = self.maps.shape[0] * self.groups * self.parts * self.cut.block_c
        return self.maps.new_empty(1 if self.cut.alone else count, dtype=torch.float32)

    def sum(self, first_unit: int, units: int, **arguments: Any) -> None:
        self.run(
            agc_sum_kernel, units * self.parts, first_unit=first_unit, steps=self.cut.part_steps,
            EVEN=self.even_parts, **self.geometry, **arguments,
        )  # fmt: skip

    def rewrite(self, kernel: Any, first_unit: int, units: int, **arguments: Any) -> None:
        self.run(
            kernel, units * self.tiles, first_unit=first_unit, steps=self.cut.tile_steps,
            tiles=self.tiles, ALONE=self.cut.alone, EVEN=self.even_tiles,
            BLOCK_T=power_of_2(self.parts, 4096 // self.cut.block_c),
            **self.geometry, **arguments,
        )  # fmt: skip

    def filters(self, **arguments: Any) -> None:
        n, c = self.maps.shape[:2]
        block_c = power_of_2(c, 32)
        self.run(
            agc_filters_kernel, divide(c, block_c), N=n, C=c, BLOCK_N=power_of_2(n, 16),
            BLOCK_C=block_c, num_warps=1, **arguments,
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
