"""A study on a Ray cluster of two nodes, started by Ray's test utilities."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workbench.study.test_reproduce import NAMES
from tests.workbench.study.tiny import reproduce

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from ray.cluster_utils import Cluster

    monkeypatch.syspath_prepend(str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.usefixtures("_two_nodes")
@pytest.mark.filterwarnings("default")  # Ray's own
def test_a_study_on_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    # Long enough for the second node to start before the first run ends.
    words = ("--executor", "ray", "--epochs", "60")
    assert reproduce(out, *words, "--minutes", "0.05") == 0  # stopped, then resumed
    assert reproduce(out, *words) == 0
    runs = json.loads((out / "study.json").read_text())["runs"]
    assert {run["name"]: run["state"] for run in runs} == dict.fromkeys(NAMES, "done")
    logs = [(out / "logs" / f"{name}.txt").read_text() for name in NAMES]
    nodes = [re.findall(r"on node (\w+)", log)[-1] for log in logs]
    assert len(set(nodes)) == 2
    assert "2 of 2 runs finished." in capsys.readouterr().out
