"""`deepcontrol reproduce` with a tiny preset: python -m tests.workbench.study.tiny OUT ..."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.study import settings

TINY = replace(
    settings.PRESETS["quick"],
    size=(32, 64),
    width=0.02,
    epochs=2,
    seeds=1,
    claims=("fig1c", "fig1e"),  # both need AGC and BatchNorm at batch 4: two runs
    train_limit=7,
    val_limit=3,
)


def reproduce(out: Path, *words: str) -> int:
    """Run in this process. The runs are processes of their own, as always."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with patch.dict(settings.PRESETS, quick=TINY):
        return main(["reproduce", "--out", str(out), *words])


if __name__ == "__main__":
    sys.exit(reproduce(Path(sys.argv[1]), *sys.argv[2:]))
