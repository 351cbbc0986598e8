"""The kernels compile for GPUs, which the interpreter cannot tell, and fit into their registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepcontrol.ops

pytest.importorskip("triton")

KERNELS = Path(deepcontrol.ops.__file__).parent / "kernels"
SPILLED = 16  # bytes of the stack that are no matter


def every_kernel() -> set[str]:
    """Whatever asks which program it is."""
    source = "\n".join(path.read_text() for path in KERNELS.glob("*.py"))
    functions = re.findall(r"@triton\.jit\ndef (\w+)\((.*?)(?=\n\n\n)", source, re.S)
    return {name for name, body in functions if "tl.program_id" in body}


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
    assert {of["kernel"] for of in compiled} == every_kernel()
    assert [of for of in compiled if of["stack"] > SPILLED] == []
