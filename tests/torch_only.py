"""An environment that holds torch, its dependencies and nothing else."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
sys.path.insert(0, sys.argv[1])
import torch
from_torch = set(sys.modules)
import deepcontrol
import deepcontrol.step
assert deepcontrol.__file__.startswith(sys.argv[1]), deepcontrol.__file__
extra = {m.split(".")[0] for m in set(sys.modules) - from_torch} - sys.stdlib_module_names
assert extra == {"deepcontrol"}, extra
for missing in ("numpy", "rich", "PIL", "tyro"):
    try:
        __import__(missing)
    except ImportError:
        continue
    raise AssertionError(f"{missing} can be imported")
model = torch.nn.Sequential(deepcontrol.AGCConv2d(3, 4, 3), deepcontrol.AGC2d(4))
model(torch.randn(1, 3, 8, 8)).square().sum().backward()
assert model[0].gain.grad is not None
print("trained")
"""


def link_torch(folder: Path) -> None:
    """Link torch and its dependencies into a folder."""
    for name in torch_and_dependencies():
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(source)


def torch_and_dependencies() -> set[str]:
    """Return the installed distributions that `pip install torch` would bring."""
    found, todo = set(), ["torch"]
    while todo:
        name = todo.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python version
        found.add(name)
        for requirement in requires:
            needed = re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0]
            if "extra ==" not in requirement and needed not in found:
                todo.append(needed)
    return found


def assert_library_trains(folder: Path) -> None:
    """Check that the deepcontrol in a folder of `link_torch` trains one step."""
    result = subprocess.run(
        [sys.executable, "-S", "-E", "-s", "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=folder,
    )
    assert result.stdout == "trained\n", result.stderr
