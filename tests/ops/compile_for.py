"""Compile every kernel ahead of time for a GPU architecture, as a training step launches it.

    python compile_for.py 90 bfloat16 float16      one line of JSON per kernel; sm_90 is an H200

Maps are contiguous for float16 and channels_last for the other types. No GPU is needed: a stub
driver answers Triton and launches nothing, and tensors are on the meta device, which has shapes and
strides but no memory. Everything before a launch runs as on a GPU.
"""

import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deepcontrol.ops.activation import empty_relu_mask
from deepcontrol.ops.gain_conv import ConvOperands
from deepcontrol.ops.reference import FilterNorm
from deepcontrol.ops.triton import agc, agc_pool, gain, one_call, pool, tiling, window

gain_conv = importlib.import_module("deepcontrol.ops.gain_conv")  # ops.gain_conv is a function

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MULTIPROCESSORS = 132
SIZES = [(8, 64, 256, 512), (1, 512, 16, 32), (2, 20, 37, 45)]  # tiled, single-pass, odd
WINDOW = ((3, 3), (15, 16))
ALWAYS = 1e9  # a consumer ratio for which every half-type map gets its sums stored


class Driver:
    """The part of a Triton driver that is used up to a launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = self
        self.loaded: list[tuple[str, bytes]] = []  # names and binaries

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 160_000, "multiprocessor_count": MULTIPROCESSORS}

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded.append((name, binary))
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, maximum threads

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return lambda *arguments: None


def maps(n: int, c: int, *size: int, dtype: torch.dtype, last: bool) -> Tensor:
    z = torch.empty(n, c, *size, dtype=dtype, device="meta")
    return z.to(memory_format=torch.channels_last) if last else z


def launch_all(dtype: torch.dtype, last: bool) -> None:
    """Launch every kernel at sizes that are tiled in different ways."""
    for shape in SIZES:
        z = maps(*shape, dtype=dtype, last=last)
        beta, lam, gamma = torch.empty(3, shape[1], device="meta")
        mean = torch.empty(shape[:2], device="meta")
        mask = empty_relu_mask(z, "relu")
        filters = maps(shape[1], shape[1], 3, 3, dtype=dtype, last=last)
        tiled = tiling.tile_maps(z, False, None, 1, True)
        map_sums = torch.empty(tiled.tiles_shape, device="meta")
        for operands in (None, ConvOperands(z, filters, map_sums)):
            agc.forward(z, beta, lam, "relu", z, True, ALWAYS, operands)
            agc_pool.forward(z, beta, lam, "relu", ALWAYS, operands)
        agc.forward(z, beta, lam, "leaky_relu", training=True)
        agc.forward(z, beta, lam, "none", gamma=gamma)
        agc.backward(z, mask, mean, None, beta, lam, "relu")
        agc.backward(z, z, mean, gamma, beta, lam, "none")
        agc.backward(z, z, mean, None, beta, lam, "silu")
        window_mask = mask if last else z
        window.forward(z, None, beta, lam, WINDOW, "relu", training=True)
        window.forward(z, gamma, beta, lam, WINDOW, "none", training=True)
        window.backward(z, z, None, beta, lam, window_mask, WINDOW, "relu")
        window.backward(z, z, gamma, beta, lam, None, WINDOW, "none")
        pooled, index = pool.pool(z, last)
        size = (shape[2], shape[3])
        agc_pool.backward(pooled, pooled, index, beta, lam, mean, size, "relu", last)
        pool.pick(z, index, last)
        pool.place(pooled, index, size, last)
        weight = maps(shape[1], shape[1], 3, 3, dtype=torch.float32, last=last)
        scaled = gain.scale(weight, gamma, dtype)
        gain.scale_backward(weight, gamma, scaled)
        gain.scale(weight, gamma, dtype, FilterNorm(2**0.5, centered=True))
        gain.scale_backward(weight, gamma, scaled, FilterNorm(2**0.5, centered=True))
        x = z[:1]
        every = one_call.Window.of(x, (1, 1))
        sums, _ = one_call.input_sums(x, every, True, last and shape[1] % 8 == 0)
        for norm in (None, FilterNorm(2**0.5, centered=True)):
            one_call.scale_with_mean(weight, gamma, beta, lam, x, every, sums, dtype, norm)
        one_call.scale_with_mean(filters, None, beta, lam, x, every, sums, dtype)
        second = one_call.Window.of(x, (2, 2))
        sums, _ = one_call.input_sums(x, second, False)
        weight = weight[..., :1, :1]
        one_call.scale_with_mean(weight, gamma, beta, lam, x, second, sums, dtype)


def resources(cubin: bytes) -> dict[str, int]:
    """Return the registers per thread and the bytes of stack, where registers are spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)
    }


def main() -> None:
    stub = Driver(int(sys.argv[1]))
    driver.set_active(stub)
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    tiling.multiprocessors = functools.cache(lambda device: MULTIPROCESSORS)
    gain_conv.MIN_ELEMENTS = 1 << 16
    for dtype in sys.argv[2:]:
        launch_all(getattr(torch, dtype), last=dtype != "float16")
        for name, binary in stub.loaded:
            print(json.dumps({"kernel": name, "dtype": dtype, **resources(binary)}))
        stub.loaded.clear()


if __name__ == "__main__":
    main()
