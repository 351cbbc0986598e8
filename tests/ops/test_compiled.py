"""Every kernel compiles for real GPU architectures and does not spill registers.

Triton's interpreter cannot check either.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepcontrol.ops

pytest.importorskip("triton")

KERNELS = Path(deepcontrol.ops.__file__).parent / "triton"
MAX_STACK = 16  # bytes of stack per thread that are tolerated


def every_kernel() -> set[str]:
    """Return the names of the jit functions that read their program id."""
    source = "\n".join(path.read_text() for path in KERNELS.glob("*.py"))
    functions = re.findall(r"@triton\.jit\ndef (\w+)\((.*?)(?=\n\n\n)", source, re.S)
    return {name for name, body in functions if "tl.program_id" in body}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [(80, ["bfloat16"]), (90, ["bfloat16", "float32", "float16"])],
    ids=["sm_80", "sm_90"],
)
def test_every_kernel_compiles(capability: int, dtypes: list[str], tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for.py")
    done = subprocess.run(
        [sys.executable, script, str(capability), *dtypes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == every_kernel()
    assert [each for each in compiled if each["stack"] > MAX_STACK] == []
