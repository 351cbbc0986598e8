"""Imports point one way, and the library needs torch and nothing else."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepcontrol

PACKAGE = Path(deepcontrol.__file__).parent
STANDARD = sys.stdlib_module_names

# What each part of the package may import from the others; itself always.
ALLOWED: dict[str, set[str]] = {
    "ops": set(),
    "nn": {"ops"},
    "convert": {"ops", "nn"},
    "__init__": {"ops", "nn", "convert"},
    "models": {"ops", "nn"},
    "data": set(),
    "losses": {"data"},
    "metrics": {"data"},
    "optim": set(),
    "sizes": set(),
    "hardware": set(),
    "train": {
        "data",
        "hardware",
        "losses",
        "metrics",
        "models",
        "nn",
        "ops",
        "optim",
        "sizes",
        "__version__",
    },
    "doctor": {"ops", "nn", "__version__"},
    "bench": {"hardware", "losses", "models", "nn", "ops", "train"},
    "predict": {"data", "nn", "sizes", "train"},
    "report": set(),
    "export": {"convert", "data", "metrics", "models", "predict", "sizes", "train", "__version__"},
    "study": {"bench", "models", "optim", "report", "train"},
    "cli": {"bench", "data", "doctor", "export", "predict", "report", "sizes", "study", "train"},
    "__main__": {"cli"},
}
LIBRARY = {"ops", "nn", "convert", "__init__"}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, at any depth of its code."""
    package = ("deepcontrol", *path.relative_to(PACKAGE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_directions(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "deepcontrol" and rest:
            assert rest[0] in ALLOWED[part] | {part}, f"{path.name} imports {name}"
        elif part in LIBRARY:
            # The kernels alone may need Triton; no one imports them before a tensor needs one.
            triton = {"triton"} if path.parent.name == "kernels" else set()
            assert top in STANDARD | {"torch", "deepcontrol"} | triton, (
                f"{path.name} imports {name}"
            )


def test_training_needs_nothing_to_draw_with() -> None:
    """A machine that only trains may be without these; the command line must start there."""
    absent = ("matplotlib", "tensorboard", "jinja2", "ray")
    script = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
import deepcontrol.cli, deepcontrol.study.worker
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def torch_and_what_it_needs() -> set[str]:
    """The distributions that `pip install torch` would bring, torch included."""
    found, todo = set(), ["torch"]
    while todo:
        name = todo.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        for requirement in requires:
            needed = re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0]
            if "extra ==" not in requirement and needed not in found:
                todo.append(needed)
    return found


def test_library_works_with_torch_alone(tmp_path: Path) -> None:
    """In a folder with torch and its own dependencies linked in, and no other package in sight."""
    for name in torch_and_what_it_needs():
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(source)
    (tmp_path / "deepcontrol").symlink_to(PACKAGE)
    script = """
import sys, warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
sys.path.insert(0, sys.argv[1])
import torch
from_torch = set(sys.modules)
import deepcontrol
extra = {m.split(".")[0] for m in set(sys.modules) - from_torch} - sys.stdlib_module_names
assert extra == {"deepcontrol"}, extra
for missing in ("numpy", "rich", "PIL"):
    try:
        __import__(missing)
    except ImportError:
        continue
    raise AssertionError(f"{missing} is in sight")
model = torch.nn.Sequential(deepcontrol.AGCConv2d(3, 4, 3), deepcontrol.AGC2d(4))
model(torch.randn(1, 3, 8, 8)).square().sum().backward()
assert model[0].gain.grad is not None
print("trained")
"""
    result = subprocess.run(
        [sys.executable, "-S", "-E", "-s", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
    )
    assert result.stdout == "trained\n", result.stderr
