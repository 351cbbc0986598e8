"""Name of the hardware that a run or a benchmark uses."""

from pathlib import Path

import torch


def hardware(device: str) -> str:
    """Return the name of the GPU, or of the CPU with the number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} threads"
