"""Print digests of four tiny training runs and of the verdicts on the committed study's runs.

    python dev/identity.py                      (before and after a refactoring, on one machine)
    PYTHONPATH=OTHER_CHECKOUT/src python dev/identity.py

A refactoring must not change a line. The digests depend on the CPU and on torch's version.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
SHARED = (
    "--device cpu --size 64x128 --train-limit 6 --val-limit 3 --batch-size 2 --epochs 2 --seed 3 "
    "--width 0.125"
)
RUNS = {
    "agc": "",
    "bn": "--norm bn --init identity --clip-grad-norm 1",
    "classnet": "--model classnet --size 128x128",
    "unit": "--init unit --lr 0.05",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in RUNS.items():
            run = Path(folder, name)
            train(run, f"{SHARED} {flags}".split())
            print(f"{name:10s} weights {weights_digest(run)}  metrics {metrics_digest(run)}")
        study = Path(folder, "camvid")
        judge_again(ROOT / "results" / "camvid", study)
        print(f"{'study':10s} verdicts {verdicts_digest(study)}")


def train(run: Path, flags: list[str]) -> None:
    deepcontrol("train", "--out", str(run), *flags)


def judge_again(committed: Path, study: Path) -> None:
    """Copy the runs of a study and judge its claims, without training."""
    shutil.copytree(committed / "runs", study / "runs")
    shutil.copyfile(committed / "bench.csv", study / "bench.csv")
    words = ["--preset", committed.name, "--data-root", committed.name, "--minutes", "0"]
    deepcontrol("reproduce", "--out", str(study), *words, "--bench", str(study / "bench.csv"))


def deepcontrol(*words: str) -> None:
    # One thread: the order of sums, and with it the last bits, depends on their number.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deepcontrol", *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def weights_digest(run: Path) -> str:
    weights = load_file(run / "last" / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].tobytes())
    return digest.hexdigest()[:16]


def metrics_digest(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [
        {k: v for k, v in json.loads(line).items() if "loss" in k or "error" in k} for line in lines
    ]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]


def verdicts_digest(study: Path) -> str:
    claims = json.loads((study / "study.json").read_text())["claims"]
    verdicts = {claim["id"]: claim["verdict"] for claim in claims}
    return hashlib.sha256(json.dumps(verdicts, sort_keys=True).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
