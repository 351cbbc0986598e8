"""Tile feature maps over Triton programs.

A *unit* is a block of BLOCK_C maps of one sample. Its positions are cut into parts, which programs
sum, and into tiles, which programs rewrite after adding up the partial sums of the parts. If maps
are small, one program does both in a single pass: it holds the unit in registers as one block.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activation import mask_packing
from ..layout import map_strides, positions, shape_cache


# Triton's own versions are meant for kernels and cost ten microseconds per call on the host.
def divide(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def power_of_2(n: int, most: int) -> int:
    """Return the next power of 2, but not more than `most`."""
    p = 1
    while p < n and p < most:
        p *= 2
    return p


BLOCK = 4096  # elements that a program reads at once; twice as many for long maps
LONG = 1 << 15  # positions
MAX_SINGLE_PASS = 512  # positions: above this, many programs read faster than one that holds a map
MAX_HELD = 16384  # elements that a single-pass program holds in registers
MAX_PARTS = 256  # partial sums of a map, which every program that rewrites it adds up


@dataclass(frozen=True)
class Tiling:
    """How maps are divided among programs.

    Attributes:
        block_c: Maps in a unit.
        block_p: Positions that a program reads at once.
        part_steps: Blocks in a part, which one program sums.
        tile_steps: Blocks in a tile, which one program rewrites.
        single_pass: One program sums and rewrites a unit, which is one block.
        warps: Warps per program.
    """

    block_c: int
    block_p: int
    part_steps: int
    tile_steps: int
    single_pass: bool
    warps: int


def choose_tiling(
    n: int,
    c: int,
    p: int,
    channels_last: bool,
    multiprocessors: int,
    held: int = 1,
    stores_sums: bool = False,
    mean_known: bool = False,
) -> Tiling:
    """Choose the tiling of N x C maps of P positions.

    For the last three arguments see TiledMaps.
    """
    if held > 0 and p * held <= MAX_SINGLE_PASS:
        return _single_pass_tiling(n, c, p, multiprocessors, held)
    block = 2 * BLOCK if p >= LONG and not (stores_sums or mean_known) else BLOCK
    small = n * c * p < 8 * multiprocessors * BLOCK
    if channels_last:
        # 64 channels of a half type fill a cache line, but small maps need more programs.
        block_c = power_of_2(c, 32 if small else 64)
        block_p = power_of_2(p, block // block_c)
    else:
        block_p = power_of_2(p, block)
        block_c = power_of_2(c, min(block // block_p, 32))
    blocks, units = divide(p, block_p), n * divide(c, block_c)
    programs = (4 * BLOCK // block if small else 4) * multiprocessors
    parts = min(MAX_PARTS, blocks, divide(programs, units))
    # With many parts to add up first, a program should rewrite more than it adds. A program that
    # sums its output should not end too often.
    if stores_sums or (parts > 16 and not mean_known):
        tile_steps = 4 if units * blocks >= 4 * multiprocessors else 2
    else:
        tile_steps = 1
    return Tiling(
        block_c,
        block_p,
        part_steps=divide(blocks, parts),
        tile_steps=tile_steps,
        single_pass=False,
        warps=max(1, min(8, block_c * block_p // 1024)),
    )


def _single_pass_tiling(n: int, c: int, p: int, multiprocessors: int, held: int) -> Tiling:
    """Put as many maps into a program as keeps all multiprocessors busy."""
    block_p = power_of_2(p, MAX_SINGLE_PASS)
    width = 64
    while width > 16 and (
        2 * n * c <= width * multiprocessors or width * block_p * held > MAX_HELD
    ):
        width //= 2
    block_c = power_of_2(c, width)
    warps = max(1, min(8, block_c * block_p // 1024))
    return Tiling(block_c, block_p, part_steps=1, tile_steps=1, single_pass=True, warps=warps)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


class TiledMaps:
    """Tiled maps of one shape and layout: counts, grids and the kernels' arguments.

    Args:
        maps: A tensor (N, C, *) of that shape and layout.
        device: The device that the kernels run on.
        tiling: The tiling; None chooses one.
        held: Maps that a single-pass program holds in registers; 0 rules out a single pass.
        stores_sums: Whether the rewriting kernel sums its output.
        mean_known: Whether the means are derived from the operands of a convolution.
    """

    def __init__(
        self,
        maps: Tensor,
        device: torch.device,
        tiling: Tiling | None = None,
        held: int = 1,
        stores_sums: bool = False,
        mean_known: bool = False,
    ) -> None:
        n, c, p = maps.shape[0], maps.shape[1], positions(maps)
        strides = map_strides(maps)
        if strides is None:
            raise ValueError(f"no kernel for strides {maps.stride()}")  # dispatch checks it first
        sn, sc, sp = strides
        self.multiprocessors = multiprocessors(device)
        self.tiling = tiling = tiling or choose_tiling(
            n, c, p, bool(sc == 1), self.multiprocessors, held, stores_sums, mean_known
        )
        self.mean_known = mean_known and not tiling.single_pass
        self.groups = divide(c, tiling.block_c)
        self.units = n * self.groups
        blocks = divide(p, tiling.block_p)
        self.parts = divide(blocks, tiling.part_steps)
        self.tiles = divide(blocks, tiling.tile_steps)
        # The shapes of partial sums and of the sums of the output.
        self.parts_shape = (n, self.groups, self.parts, tiling.block_c)
        self.tiles_shape = (n, self.groups, self.tiles, tiling.block_c)
        if tiling.single_pass:
            self.parts_shape = (1, 1, 1, 1)
        self.sum_grid = (self.units * self.parts, 1, 1)
        self.rewrite_grid = (self.units * self.tiles, 1, 1)
        # The positions that the threads of a program read at once.
        self.rows = min(tiling.block_p, max(1, 256 * tiling.warps // tiling.block_c))
        even = c % tiling.block_c == 0 and p % tiling.block_p == 0
        common = dict(
            C=c, P=p, groups=self.groups, parts=self.parts, sn=sn, sc=sc, sp=sp,
            MASK_PACKING=mask_packing(maps), BLOCK_P=tiling.block_p, BLOCK_C=tiling.block_c,
            num_warps=tiling.warps,
        )  # fmt: skip
        # EVEN_BLOCKS: every program of the launch has full blocks, so no bounds are checked.
        self.sum_arguments = dict(
            common, steps=tiling.part_steps, ROWS=self.rows,
            EVEN_BLOCKS=bool(even and blocks % tiling.part_steps == 0),
        )  # fmt: skip
        self.rewrite_arguments = dict(
            common, steps=tiling.tile_steps, tiles=self.tiles, SINGLE_PASS=tiling.single_pass,
            EVEN_BLOCKS=bool(even and blocks % tiling.tile_steps == 0),
        )  # fmt: skip

    def empty_partial_sums(self, like: Tensor) -> Tensor:
        """Allocate partial sums (N, groups, parts, channels of a group)."""
        return like.new_empty(self.parts_shape, dtype=torch.float32)

    def add_up(self, partial_sums: Tensor) -> dict[str, int]:
        """Return the arguments of a kernel that adds up partial sums."""
        parts = partial_sums.shape[2]
        # At least 16 at once: with fewer, the compiler uses half as many registers again.
        block_t = power_of_2(max(parts, 16), 4096 // self.tiling.block_c)
        return dict(parts=parts, BLOCK_T=block_t)


def tile_maps(maps: Tensor, traced: bool, *options: Any) -> TiledMaps:
    """Return the TiledMaps of maps from the cache.

    `options` are the arguments of TiledMaps after `device`.
    """
    if traced:  # symbolic sizes belong to one trace
        return TiledMaps(maps, maps.device, *options)
    return shape_cache(_tile_maps, maps.shape, maps.stride(), maps.device, *options)


def _tile_maps(
    shape: torch.Size, strides: tuple[int, ...], device: torch.device, *options: Any
) -> TiledMaps:
    return TiledMaps(torch.empty_strided(shape, strides, device="meta"), device, *options)
