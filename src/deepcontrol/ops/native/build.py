"""Compile the helper for eager mode with the machine's C++ compiler, and load it.

A build belongs to one torch, Python and source, all of which are part of its name. It lies in the
user's cache ($XDG_CACHE_HOME/deepcontrol or ~/.cache/deepcontrol). CUDA's toolkit is not needed.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).parent
FILES = ("eager.cpp", "program.h")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def cache_folder() -> Path:
    """Return the folder of all builds."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "deepcontrol" / "native"


@functools.cache
def library_path() -> Path:
    """Return the build's path for this torch, Python and source; it may not exist."""
    digest = hashlib.sha256()
    for name in FILES:
        digest.update((SOURCE / name).read_bytes())
    versions = (
        torch.__version__, torch.version.git_version, str(torch._C._GLIBCXX_USE_CXX11_ABI),
        sys.implementation.cache_tag, platform.machine(),
    )  # fmt: skip
    digest.update("\0".join(versions).encode())
    name = (
        f"eager-torch{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"
    )
    return cache_folder() / f"{name}.so"


def compile_command(output: Path) -> list[str]:
    """Return the compiler's command line."""
    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")
    python = sysconfig.get_paths()["include"]
    return [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{path}" for path in (*includes, python)),
        str(SOURCE / "eager.cpp"),
        *("-o", str(output)),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
    ]  # fmt: skip


def build() -> Path:
    """Compile the helper unless it is there; return its path.

    Each process compiles into a file of its own and moves it to its place, so several may build at
    once.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    target = library_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    part = Path(name)
    command = compile_command(part)
    try:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(
                f"cannot run the C++ compiler {command[0]!r}: {error}. Install g++ 10 or newer, or "
                "set CXX."
            ) from None
        if done.returncode != 0:
            errors = done.stderr.strip()[-4000:]
            hint = "" if "Python.h" not in errors else " Install Python's headers (python3-dev)."
            raise RuntimeError(
                f"the C++ compiler failed with exit code {done.returncode}.{hint}\n"
                f"{shlex.join(command)}\n{errors}"
            )
        part.chmod(0o755)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


@functools.cache
def load() -> ModuleType | None:
    """Load the build for this torch, Python and source; return None if there is none.

    Raises:
        ImportError: The file cannot be loaded.
    """
    path = library_path()
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader("_eager", str(path))
    spec = importlib.util.spec_from_file_location("_eager", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
