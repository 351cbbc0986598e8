"""`python -m deepcontrol.ops.native` compiles the helper for eager mode."""

import sys
import time

from .build import build, library_path


def main() -> int:
    """Build the helper and return the exit code."""
    if library_path().exists():
        print(f"already built: {library_path()}")
        return 0
    start = time.perf_counter()
    try:
        path = build()
    except RuntimeError as error:
        print(f"deepcontrol: {error}", file=sys.stderr)
        return 1
    print(f"built in {time.perf_counter() - start:.0f} s: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
