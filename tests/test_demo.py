"""What `make demo` runs can be parsed; the runs themselves take minutes."""

import importlib.util
from pathlib import Path

from deepcontrol.cli import parse
from deepcontrol.train.config import Train

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.py"


def test_commands_of_the_demo(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    seen = []
    for run in demo.RUNS:
        command = parse(run.command(tmp_path, epochs=3))
        assert isinstance(command, Train)
        assert command.out == tmp_path / run.name
        assert command.sample_epochs[-1] == command.epochs == 3  # the page shows the end
        seen.append((command.norm, command.batch_size))
    assert sorted(seen) == [("agc", 1), ("agc", 4), ("bn", 1), ("bn", 4)]
