"""Eq. 1 and its backward on a GPU: how maps are cut, and the launches. The kernels: agc_device.py.

All the time is memory's, and a map is needed twice: for its mean, then to be rewritten. That is a
launch of sums and a launch of rewriting over the whole batch. Where a map is small, one program
does both and reads it once; the mean of a large one may be known beforehand (window_mean.py). Finer
ways to have the second read in the L2 cache (chunks of samples, programs that wait for one another)
have all cost more than they saved: LOG.md has the figures.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activation import ACTIVATIONS
from ..backend import map_strides
from ..maps import like_layout, memory_order, positions
from ..open_bits import packing
from ..remember import remembered
from ..window_mean import Origin, serves
from .agc_device import agc_backward_kernel, agc_filters_kernel, agc_forward_kernel, agc_sum_kernel
from .launch import divide, launch, power_of_2
from .window_mean import window_mean

BLOCK = 4096  # elements that a program reads at once; twice as many of long maps
LONG = 1 << 15  # positions
ALONE = 512  # positions of a map that one program holds in its registers: more programs read faster
MOST_HELD = 16384  # elements that it holds
MOST_PARTS = 256  # partial sums of a map, which every program that rewrites it adds up


@dataclass(frozen=True)
class Plan:
    """How maps are cut."""

    block_c: int  # maps in a unit
    block_p: int  # positions that a program reads at once
    part_steps: int  # how often it does, to sum a part
    tile_steps: int  # how often it does, to rewrite a tile
    alone: bool  # one program sums and rewrites a unit, which is one block
    warps: int


def plan(
    n: int,
    c: int,
    p: int,
    channels_last: bool,
    multiprocessors: int,
    held: int = 1,
    leaves: bool = False,
    known: bool = False,
) -> Plan:
    """The cut for N x C maps of P positions; held, leaves, known: see Launches."""
    if held > 0 and p * held <= ALONE:
        return _plan_alone(n, c, p, multiprocessors, held)
    block = 2 * BLOCK if p >= LONG and not (leaves or known) else BLOCK
    small = n * c * p < 8 * multiprocessors * BLOCK
    if channels_last:
        # 64 channels of a half type are a whole line of the cache; but small maps need programs.
        block_c = power_of_2(c, 32 if small else 64)
        block_p = power_of_2(p, block // block_c)
    else:
        block_p = power_of_2(p, block)
        block_c = power_of_2(c, min(block // block_p, 32))
    blocks, units = divide(p, block_p), n * divide(c, block_c)
    programs = (4 * BLOCK // block if small else 4) * multiprocessors
    parts = min(MOST_PARTS, blocks, divide(programs, units))
    # Where there are many parts to add up first, a program should rewrite more than it adds; and
    # where it sums what it writes, it should not end too often.
    if leaves or (parts > 16 and not known):
        tile_steps = 4 if units * blocks >= 4 * multiprocessors else 2
    else:
        tile_steps = 1
    return Plan(
        block_c,
        block_p,
        part_steps=divide(blocks, parts),
        tile_steps=tile_steps,
        alone=False,
        warps=max(1, min(8, block_c * block_p // 1024)),
    )


def _plan_alone(n: int, c: int, p: int, multiprocessors: int, held: int) -> Plan:
    """As many maps in a program as leave all multiprocessors something to do."""
    block_p = power_of_2(p, ALONE)
    width = 64
    while width > 16 and (
        2 * n * c <= width * multiprocessors or width * block_p * held > MOST_HELD
    ):
        width //= 2
    block_c = power_of_2(c, width)
    warps = max(1, min(8, block_c * block_p // 1024))
    return Plan(block_c, block_p, part_steps=1, tile_steps=1, alone=True, warps=warps)


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
    totals: Tensor | None = None,
    origin: Origin | None = None,
    cut: Plan | None = None,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:
    """y and the means (N, C); y is written to `out` where given, which may be z itself.

    bits, where given, are set to where the activation is open (open_bits.py), and totals, of
    empty_totals, to the sums of y. With an origin that serves, z is not read for its mean.
    """
    dense = like_layout(z, memory_order(z))
    if out is not None and dense is not z:  # not laid out as the kernel will write
        y, mean = forward(
            dense, gamma, beta, lam, activation, None, bits, totals, origin, cut, traced
        )
        return out.copy_(y), mean
    z = dense
    gamma = None if gamma is None else gamma.contiguous()
    beta, lam = beta.contiguous(), lam.contiguous()
    y = torch.empty_like(z) if out is None else out
    mean = z.new_empty(z.shape[:2], dtype=torch.float32)
    leaves, known = totals is not None, serves(z, origin)
    launches = Launches(z, cut, traced, leaves=leaves, known=known)
    partial = launches.sums_of(z, origin)
    launches.rewrite(
        agc_forward_kernel, partial, z=z, y=y, bits=bits, totals=totals, mean=mean, gamma=gamma,
        beta=beta, lam=lam, ACT=activation, KNOWN=launches.known, ROWS=launches.geometry.rows,
    )  # fmt: skip
    return y, mean


def empty_totals(y: Tensor) -> Tensor:
    """Room for the sums of y's maps as `forward` leaves them: (N, groups, tiles, channels)."""
    geometry = Launches(y, None, traced=False, leaves=True).geometry
    shape = (y.shape[0], geometry.groups, geometry.tiles, geometry.cut.block_c)
    return y.new_empty(shape, dtype=torch.float32)


def totals_of(x: Tensor) -> Tensor:
    """The sums of x's maps, where nobody has left them."""
    return Launches(x, None, traced=False, held=0).sums_of(x, None)


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
    launches = Launches(g, cut, traced, held=1 if gamma is None else 2)
    sums = launches.sums(mean, dgamma, dbeta, dlam)
    partial = launches.partial_sums()
    partial_hz = partial if gamma is None else launches.partial_sums()
    common = dict(
        g=g, kept=kept, mean=mean, gamma=gamma, beta=beta, lam=lam,
        partial_hz=partial_hz, ACT=activation, KEPT=kind, TWO=gamma is not None,
    )  # fmt: skip
    if not launches.cut.alone:
        launches.sum(partial=partial, **common)
    launches.rewrite(agc_backward_kernel, partial, dz=dz, **sums, **common)
    launches.filters(sums, mean=mean, gamma=gamma, dgamma=dgamma, dbeta=dbeta, dlam=dlam)
    return dz, dgamma, dbeta, dlam


class Geometry:
    """Maps of one shape and layout, cut: how many of everything, and what each kernel is told."""

    def __init__(
        self,
        maps: Tensor,
        device: torch.device,
        cut: Plan | None,
        held: int,
        leaves: bool,
        known: bool,
    ) -> None:
        n, c, p = maps.shape[0], maps.shape[1], positions(maps)
        strides = map_strides(maps)
        if strides is None:
            raise ValueError(f"no kernel for strides {maps.stride()}")  # backend.py asks first
        sn, sc, sp = strides
        self.multiprocessors = _multiprocessors(device)
        of = (n, c, p, bool(sc == 1), self.multiprocessors, held, leaves, known)
        self.cut = cut = cut or plan(*of)
        self.groups = divide(c, cut.block_c)
        self.units = n * self.groups
        blocks = divide(p, cut.block_p)
        self.parts, self.tiles = divide(blocks, cut.part_steps), divide(blocks, cut.tile_steps)
        even = c % cut.block_c == 0 and p % cut.block_p == 0
        self.rows = min(cut.block_p, max(1, 256 * cut.warps // cut.block_c))
        common = dict(
            C=c, P=p, groups=self.groups, parts=self.parts, sn=sn, sc=sc, sp=sp,
            PACK=packing(maps), BLOCK_P=cut.block_p, BLOCK_C=cut.block_c, num_warps=cut.warps,
        )  # fmt: skip
        # EVEN: without masks, where every program of the launch is full.
        self.of_sum = dict(
            common, steps=cut.part_steps, EVEN=bool(even and blocks % cut.part_steps == 0),
            ROWS=self.rows,
        )  # fmt: skip
        self.of_rewrite = dict(
            common, steps=cut.tile_steps, tiles=self.tiles, ALONE=cut.alone,
            EVEN=bool(even and blocks % cut.tile_steps == 0),
        )  # fmt: skip


def _geometry(maps: Tensor, traced: bool, *how: Any) -> Geometry:
    """how: all that a Geometry is told besides the maps and the device."""
    if traced:  # a Geometry of symbols is that trace's alone
        return Geometry(maps, maps.device, *how)
    return remembered(_geometry_of, maps.shape, maps.stride(), maps.device, *how)


def _geometry_of(
    shape: torch.Size, strides: tuple[int, ...], device: torch.device, *how: Any
) -> Geometry:
    return Geometry(torch.empty_strided(shape, strides, device="meta"), device, *how)


class Launches:
    """The launches over maps (N, C, *) that are all laid out alike; traced: a compiler watches.

    held: how many maps a program that is alone holds; 0 if it cannot be. leaves: whether the one
    that rewrites sums what it writes. known: whether the means are, by the maps' origin.
    """

    def __init__(
        self,
        maps: Tensor,
        cut: Plan | None,
        traced: bool,
        held: int = 1,
        leaves: bool = False,
        known: bool = False,
    ) -> None:
        geometry = _geometry(maps, traced, cut, held, leaves, known)
        self.known = known and not geometry.cut.alone
        self.maps, self.traced, self.geometry, self.cut = maps, traced, geometry, geometry.cut
        self.units, self.groups, self.parts = geometry.units, geometry.groups, geometry.parts

    def partial_sums(self) -> Tensor:
        """Room for them: (N, groups, parts, channels of a group)."""
        n, alone = self.maps.shape[0], self.cut.alone
        shape = (1, 1, 1, 1) if alone else (n, self.groups, self.parts, self.cut.block_c)
        return self.maps.new_empty(shape, dtype=torch.float32)

    def sums_of(self, z: Tensor, origin: Origin | None) -> Tensor:
        """The partial sums of z: read, or known by its origin; nothing where programs are alone."""
        if origin is not None and self.known:
            totals = totals_of(origin.x) if origin.totals is None else origin.totals
            return window_mean(origin, totals, self.cut.block_c)
        partial = self.partial_sums()
        if not self.cut.alone:
            self.sum(
                g=z, kept=z, mean=None, gamma=None, beta=None, lam=None, partial=partial,
                partial_hz=partial, ACT="none", KEPT="nothing", TWO=False,
            )  # fmt: skip
        return partial

    def adding_up(self, partial: Tensor) -> dict[str, int]:
        """What a kernel is told that adds up these partial sums."""
        parts = partial.shape[2]
        # At least 16 at once: with fewer, the compiler takes half as many registers again.
        return dict(parts=parts, BLOCK_T=power_of_2(max(parts, 16), 4096 // self.cut.block_c))

    def sum(self, **arguments: Any) -> None:
        self.run(agc_sum_kernel, self.units * self.parts, **self.geometry.of_sum, **arguments)

    def rewrite(self, kernel: Any, partial: Tensor, **arguments: Any) -> None:
        geometry = self.geometry
        known = {**geometry.of_rewrite, **self.adding_up(partial), "partial": partial}
        self.run(kernel, self.units * geometry.tiles, **known, **arguments)

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
        launch(kernel, (programs, 1, 1), self.traced, self.maps.device, **arguments)
