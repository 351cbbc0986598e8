"""The command line itself: help, errors, a missing extra, a closed pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepcontrol.workbench import COMMANDS
from deepcontrol.workbench.cli import SETTINGS, main
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import save_config

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
    for name, summary in COMMANDS.items():
        assert any(name in line and summary in line for line in lines), name


def test_help_without_the_extra_lists_the_commands() -> None:
    outcome = run_without("tyro", "rich", args=("--help",))
    assert outcome.returncode == 0
    lines = outcome.stdout.splitlines()
    for name, summary in COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in lines), name
    assert 'pip install ".[workbench]"' in outcome.stdout
    assert run_without("tyro", args=()).returncode == 2
    assert list(SETTINGS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_its_whole_docstring(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(f"usage: deepcontrol {name}")
    last_words = (SETTINGS[name].__doc__ or "").split()[-3:]
    assert " ".join(last_words) in output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_no_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Optional values are INT, not {None}|INT, and a default is in words or a value."""
    for words in ([name], [name, "check"], [name, "sheet"]) if name == "data" else ([name],):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        output = " ".join(capsys.readouterr().out.replace("│", "").split())
        for untidy in ("None", "(default: )", "Default: Default"):
            assert untidy not in output, untidy
        assert len(output) < 12_000


def test_help_of_a_run_shows_its_own_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(Train(out=tmp_path, lr=0.123, batch_size=3), {}, {})
    with pytest.raises(SystemExit):
        main(["train", "--out", str(tmp_path), "--help"])
    output = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "(default: 0.123)" in output
    assert "Images per step, over all processes. (default: 3)" in output


def test_claims_are_listed_by_the_dry_run_not_by_the_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    assert "lambda-deepest" not in capsys.readouterr().out
    words = ["reproduce", "--preset", "quick", "--out", str(tmp_path / "study"), "--dry-run"]
    assert main(words) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Claims: fig1b, fig1a, fig1a-alike, fig1c, fig1e, single-sample" in output
    assert "Others for --only: spikes," in output
    with pytest.raises(SystemExit):
        main([*words, "--only", "fig9"])
    assert "lambda-deepest" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["tarin"], ["bench", "--onyl", "ops"]])
def test_wrong_arguments_exit_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "rich", "numpy", "PIL", "safetensors"])
def test_missing_extra_is_one_line(package: str) -> None:
    result = run_without(package, args=("train", "--help"))
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
