"""Packages that only an export needs: imported when it does, and named when they are missing."""

import importlib.metadata
import importlib.util

# Packages of each extra in pyproject.toml, by the names under which they are imported.
EXTRAS = {
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "executorch": ("executorch",),
}


class MissingPackageError(ValueError):
    """A target was asked for whose packages are not installed."""


def require(target: str, extra: str) -> None:
    """MissingPackageError, with the command that helps, unless the extra's packages are there."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"{target} needs {', '.join(missing)}: pip install 'deepcontrol[{extra}]'"
        )


def versions(extra: str | None) -> dict[str, str]:
    """The versions of torch and of an extra's packages."""
    names = ("torch", *(EXTRAS[extra] if extra is not None else ()))
    return {name: importlib.metadata.version(name) for name in names}
