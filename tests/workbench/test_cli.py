"""The command line: help, a missing extra, a closed pipe, and errors as one line."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepcontrol.__main__ import main as command_line
from deepcontrol._startup import is_command
from deepcontrol.workbench import COMMANDS, cli
from deepcontrol.workbench.cli import SETTINGS, main
from deepcontrol.workbench.errors import LESS_MEMORY, explain
from deepcontrol.workbench.train.config import Train
from deepcontrol.workbench.train.config_file import save_config
from deepcontrol.workbench.train.faults import is_out_of_memory

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


def test_wrong_values_do_not_show_the_settings_class(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--out", "x", "--lr", "-1"])
    assert "Error parsing options: --lr must be positive, got -1.0" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tyro", "rich", "numpy", "PIL", "safetensors"])
def test_missing_extra_is_one_line(package: str) -> None:
    result = run_without(package, args=("train", "--help"))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert 'pip install ".[workbench]"' in line
    assert package in line


def test_import_of_the_trainer_names_the_extra() -> None:
    code = "import sys; sys.modules['tyro'] = None; import deepcontrol.workbench.train"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'run: pip install ".[workbench]"' in result.stderr.splitlines()[-1]


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


MEMORY_ERRORS = (
    MemoryError(),
    MemoryError("Unable to allocate 4.00 GiB for an array"),
    RuntimeError("could not create a primitive"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("can't start new thread"),
    ImportError("ft2font.so: failed to map segment from shared object"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
)


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(*args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", run)


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=str)
def test_exhausted_memory_is_one_line_with_a_remedy(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, error)
    for words, remedy in (
        (["eval", "run"], "smaller --batch-size"),
        (["predict", "run", "x.png"], "smaller --tile"),
        (["report", "run"], "fewer runs"),
        (["export", "run"], "more memory"),
    ):
        assert main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(r"^error: out of memory on cpu \(peak [\d,]+ MiB", line), line
        assert remedy in line
    assert set(LESS_MEMORY) == set(COMMANDS)


def test_other_errors_are_not_out_of_memory() -> None:
    for error in (RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full"), ValueError("x")):
        assert not is_out_of_memory(error)


def test_bugs_are_one_line_with_a_saved_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raising(monkeypatch, KeyError("la\x1b[2Jbel\nsecond line"))
    assert main(["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unexpected KeyError: ")
    assert "\x1b" not in line
    (saved,) = tmp_path.glob("deepcontrol-*.txt")
    assert str(saved) in line
    text = saved.read_text()
    assert text.startswith("Traceback (most recent call last)")
    assert "in main" in text
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert "could not be saved" in explain(KeyError("x"), "doctor", None)


def test_interrupted_command_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


def test_interrupt_during_the_imports_prints_nothing() -> None:
    """Torch is replaced by a module that raises what Ctrl-C raises."""
    script = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.argv = ["/usr/bin/deepcontrol", "doctor"]
class Interrupted:
    def find_spec(self, name, *args):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
import deepcontrol.__main__
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "")
    assert result.returncode in (-2, 130)
    as_library = script.replace("/usr/bin/deepcontrol", "train.py")
    result = subprocess.run([sys.executable, "-c", as_library], capture_output=True, text=True)
    assert "KeyboardInterrupt" in result.stderr  # a script of a user keeps its traceback


def test_interrupt_during_the_commands_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *args: object) -> None:
            if name == "deepcontrol.workbench.cli":
                raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["deepcontrol", "doctor"])
    monkeypatch.delitem(sys.modules, "deepcontrol.workbench.cli")
    monkeypatch.setattr("sys.meta_path", [Interrupted(), *sys.meta_path])
    assert command_line() == 130
    assert is_command(["deepcontrol"])
    assert not is_command(["pytest"])
    assert not is_command([])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--out", ""], "--out is empty"),
        (["train", "--out="], "--out is empty"),
        (["reproduce", "--out", "x", "--only", ""], "--only is empty"),
        (["eval", ""], "an argument is empty"),
        (["reproduce", "--out", "x", "--only", ","], "--only names no claim"),
        (["reproduce", "--out", "x", "--minutes", "nan"], "--minutes must be at least 0, got nan"),
        (["bench", "--minutes", "nan"], "--minutes must be at least 0, got nan"),
        (["bench", "--minutes", "-1"], "--minutes must be at least 0, got -1"),
    ],
)
def test_empty_values_and_nan_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_version_needs_no_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["deepcontrol", "--version"])
    monkeypatch.setitem(sys.modules, "deepcontrol.workbench.cli", None)
    assert command_line() == 0
    assert re.fullmatch(r"deepcontrol \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


DEVICE_ERRORS = (
    RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ..."),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
)


@pytest.mark.parametrize("error", DEVICE_ERRORS, ids=str)
def test_failed_gpu_is_one_line_and_ends_the_process(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)  # torch's destructors would abort the process
    raising(monkeypatch, error)
    assert main(["eval", "run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the GPU failed: {str(error).splitlines()[0]}. ")
    (saved,) = tmp_path.glob("deepcontrol-*.txt")  # the cause may be a kernel of this package
    assert line.endswith(str(saved))
    assert codes == [1]
    raising(monkeypatch, RuntimeError("CUDA error: out of memory"))
    assert main(["eval", "run"]) == 1
    assert "out of memory" in capsys.readouterr().err
    assert codes == [1]  # memory that ran out leaves the device as it was


def test_exhausted_descriptors_name_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a library reports an error of its own in place of it."""
    error = RuntimeError("could not get source code")
    error.__context__ = OSError(errno.EMFILE, "Too many open files")
    raising(monkeypatch, error)
    assert main(["doctor"]) == 1
    assert re.search(r"too many open files: this process may open \d+", capsys.readouterr().err)


@pytest.mark.parametrize("problem", [OSError(errno.EMFILE, "no descriptor"), MemoryError()])
def test_errors_are_printed_if_the_console_fails(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise problem

    raising(monkeypatch, ValueError("x\x1b[2J"))
    monkeypatch.setattr("rich.console.Console.print", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: x\\x1b[2J\n"
