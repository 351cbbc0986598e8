"""Compile every kernel for a GPU that is not there, as a training step would launch it.

    python compile_for.py 90 bfloat16 float16      a line of JSON for each; sm_90 is an H200's

float16 is for contiguous maps here, the others for channels_last.

A driver of this file's own answers Triton's questions and launches nothing; tensors are on meta,
which has shapes and strides and no memory. So all that runs before a launch runs as on the GPU.
"""

import functools
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

from deepcontrol.ops import window_mean
from deepcontrol.ops.kernels import agc, agc_pool, gain, pool
from deepcontrol.ops.open_bits import empty_bits
from deepcontrol.ops.window_mean import Origin

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MULTIPROCESSORS = 132
SIZES = [(8, 64, 256, 512), (1, 512, 16, 32), (2, 20, 37, 45)]  # cut, held by one program, odd


class Driver:
    """What Triton asks of a driver up to a launch."""

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
        return 1, 1, 0, 0, 1024  # handles, registers, spills, the most threads of a program

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return lambda *arguments: None


def maps(n: int, c: int, *size: int, dtype: torch.dtype, last: bool) -> Tensor:
    z = torch.empty(n, c, *size, dtype=dtype, device="meta")
    return z.to(memory_format=torch.channels_last) if last else z


def launch_all(dtype: torch.dtype, last: bool) -> None:
    """Every kernel, at sizes that are cut in different ways."""
    for shape in SIZES:
        z = maps(*shape, dtype=dtype, last=last)
        beta, lam, gamma = torch.empty(3, shape[1], device="meta")
        mean = torch.empty(shape[:2], device="meta")
        bits = empty_bits(z, "relu")
        filters = maps(shape[1], shape[1], 3, 3, dtype=dtype, last=last)
        left = agc.empty_totals(z)
        for origin in (None, Origin(z, filters, left)):
            agc.forward(z, None, beta, lam, "relu", z, bits, left, origin)
            agc_pool.forward(z, beta, lam, "relu", agc_pool.empty_totals(z), origin)
        agc.forward(z, None, beta, lam, "leaky_relu", bits=empty_bits(z, "leaky_relu"))
        agc.forward(z, gamma, beta, lam, "none")
        agc.backward(z, bits, mean, None, beta, lam, "relu")
        agc.backward(z, z, mean, gamma, beta, lam, "none")
        agc.backward(z, z, mean, None, beta, lam, "silu")
        pooled, index = pool.pool(z, last)
        size = (shape[2], shape[3])
        agc_pool.backward(pooled, pooled, index, beta, lam, mean, size, "relu", last)
        pool.pick(z, index, last)
        pool.place(pooled, index, size, last)
        weight = maps(shape[1], shape[1], 3, 3, dtype=torch.float32, last=last)
        scaled = gain.scale(weight, gamma, dtype)
        gain.scale_backward(weight, gamma, scaled)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of the stack: what did not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)
    }


def main() -> None:
    pretended = Driver(int(sys.argv[1]))
    driver.set_active(pretended)
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]
    agc._multiprocessors = functools.cache(lambda device: MULTIPROCESSORS)
    window_mean.WORTH = 1 << 16
    for dtype in sys.argv[2:]:
        launch_all(getattr(torch, dtype), last=dtype != "float16")
        for name, binary in pretended.loaded:
            print(json.dumps({"kernel": name, "dtype": dtype, **resources(binary)}))
        pretended.loaded.clear()


if __name__ == "__main__":
    main()
