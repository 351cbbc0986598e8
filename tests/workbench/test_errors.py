"""Exceptions become one line: memory, bugs, empty values, interrupts."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepcontrol.__main__ import main as command_line
from deepcontrol._startup import is_command
from deepcontrol.workbench import COMMANDS, cli
from deepcontrol.workbench.cli import main
from deepcontrol.workbench.errors import LESS_MEMORY, explain
from deepcontrol.workbench.train.faults import is_out_of_memory

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
import sys
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
