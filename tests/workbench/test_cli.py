"""The command line itself: help, errors, a missing extra, a closed pipe."""

import os
import subprocess
import sys

import pytest

from deepcontrol.workbench.cli import COMMANDS, main

WITHOUT = """
import sys
for name in {names}:
    sys.modules[name] = None
from deepcontrol.__main__ import main
sys.argv = ["deepcontrol", *{args}]
sys.exit(main())
"""


def run_without(*names: str, args: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that cannot import some packages."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT.format(names=names, args=args)]
    return subprocess.run(command, capture_output=True, text=True)  # torch warns without numpy


def test_help_fits_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    for name, (_, summary) in COMMANDS.items():
        assert any(name in line and summary in line for line in lines), name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_its_whole_docstring(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(f"usage: deepcontrol {name}")
    last_words = (COMMANDS[name][0].__doc__ or "").split()[-3:]
    assert " ".join(last_words) in output


@pytest.mark.parametrize("args", [[], ["tarin"], ["bench", "--onyl", "ops"]])
def test_wrong_arguments_exit_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "rich", "numpy", "PIL", "safetensors"])
def test_missing_extra_is_one_line(package: str) -> None:
    result = run_without(package, args=("--help",))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert 'pip install ".[workbench]"' in line
    assert package in line


def test_missing_module_of_this_package_is_not_hidden() -> None:
    result = run_without("deepcontrol.workbench.bench", args=("--help",))
    assert result.returncode == 1
    assert "ModuleNotFoundError" in result.stderr
    assert "pip install" not in result.stderr


@pytest.mark.parametrize("args", [("--help",), ("bench", "--help"), ("doctor",)])
def test_closed_pipe_prints_nothing(args: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "deepcontrol", *args], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert result.stderr == b""
    assert result.returncode in (1, 141)  # rich exits with 1 by itself
