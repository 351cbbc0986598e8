"""`python -m deepcontrol.ops.native` compiles the helper for eager mode."""

import sys
import time

from .build import build, library_path, load


def main() -> int:
    """Build the helper and return the exit code."""
    start = time.perf_counter()
    try:
        if is_built():
            print(f"already built: {library_path()}")
            return 0
        path = build()
    except (RuntimeError, OSError) as error:
        print(f"deepcontrol: {error}", file=sys.stderr)
        return 1
    print(f"built in {time.perf_counter() - start:.0f} s: {path}")
    return 0


def is_built() -> bool:
    """Return whether there is a build that loads; remove one that does not."""
    try:
        return load() is not None
    except ImportError as error:
        print(f"building again, because the present build does not load: {error}")
        library_path().unlink()
        return False


if __name__ == "__main__":
    sys.exit(main())
