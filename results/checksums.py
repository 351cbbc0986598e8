"""Add checksums to the committed studies' files that have none, and verify the others.

    python results/checksums.py          (after copying results of an older version; repeatable)

The files are study.json, and config.json, metrics.jsonl, layers.jsonl and diverged.json of each
run. Only the key "crc" is added; no other byte changes.
"""

import sys
from pathlib import Path

from deepcontrol.workbench.folders.storage import (
    add_checksum,
    add_checksums,
    parse_object,
    read_bytes,
    write_atomic,
)

ROOT = Path(__file__).parent


def main() -> int:
    changed = [path for path in files() if complete(path)]
    print(f"{len(changed)} of {len(files())} files had no checksum")
    return 0


def files() -> list[Path]:
    """Return all files of the committed studies that have checksums."""
    patterns = ("*/study.json", "*/runs/*/*.json", "*/runs/*/*.jsonl")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def complete(path: Path) -> bool:
    """Add the checksum, or one per line; return whether the file had none.

    Raises:
        ValueError: A checksum is wrong.
    """
    if path.suffix == ".jsonl":
        return add_checksums(path)
    content = read_bytes(path)
    try:
        has_checksum = parse_object(content)[1]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not has_checksum:
        write_atomic(path, add_checksum(content.decode()) + "\n")
    return not has_checksum


if __name__ == "__main__":
    sys.exit(main())
