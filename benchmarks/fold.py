"""Time inference of SegNet on a CPU: folded AGC against folded BatchNorm.

    python benchmarks/fold.py [--rounds 30] [--threads 1] [--out benchmarks/results/fold-cpu.csv]

AGC is automatic gain control. Both networks run at batch 1 in fp32 and in eval mode. torch's
fuse_conv_bn_eval folds BatchNorm to convolutions with constant biases; deepcontrol.fold folds AGC
to convolutions with computed biases. The contenders are interleaved in one run, in alternating
order, and the ratio is taken within each round, so that the machine's noise affects all of them.
With one thread, the default, times are CPU times, which exclude waiting for a core. With more
threads they are wall-clock times, which need an idle machine.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from deepcontrol import calibrate, fold
from deepcontrol.workbench.bench.results import write_results
from deepcontrol.workbench.hardware import hardware
from deepcontrol.workbench.models import SegNet

PEER = "BatchNorm, folded"


def fold_batchnorm_(model: nn.Module) -> nn.Module:
    """Fold each BatchNorm into the convolution before it, in place."""
    for row in model.modules():
        if isinstance(row, nn.Sequential) and len(row) > 1 and isinstance(row[1], nn.BatchNorm2d):
            convolution = row[0]
            assert isinstance(convolution, nn.Conv2d)
            row[0], row[1] = fuse_conv_bn_eval(convolution, row[1]), nn.Identity()
    return model


def contenders(width: float, x: Tensor) -> dict[str, nn.Module]:
    """Build the networks, and check that folding keeps AGC's outputs."""
    agc = SegNet(19, width=width, norm="agc").eval()
    batchnorm = SegNet(19, width=width, norm="bn").eval()
    folded = fold(agc)
    # Not all outputs: where two values of a pooling window are equal up to rounding, either may be
    # the maximum, and unpooling then moves a value by a pixel (1 window in a million).
    same = torch.isclose(folded(x), agc(x), rtol=1e-4, atol=1e-5).double().mean()
    if same < 0.9:
        raise RuntimeError(
            f"folding changed the outputs: only {same:.1%} agree, expected at least 90%"
        )
    return {
        PEER: fold_batchnorm_(batchnorm),
        "AGC, folded": folded,
        "AGC, fixed means": calibrate(agc, [x]),
        "AGC, not folded": agc,
    }


def milliseconds(model: nn.Module, x: Tensor) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    model(x)
    return 1e3 * (clock() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="timed calls per contender, at least 2"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--width", type=float, default=1.0, help="width of SegNet")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 512), metavar=("H", "W"))
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/fold-cpu.csv"), help="CSV file"
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    torch.set_num_threads(args.threads)
    height, width = args.size
    print(f"SegNet x {args.width}, {height}x{width}, batch 1, fp32, on {hardware('cpu')}.")

    torch.manual_seed(0)
    x = torch.randn(1, 3, height, width)
    times: dict[str, list[float]] = {}
    with torch.no_grad():
        models = contenders(args.width, x)
        for repetition in range(args.rounds + 2):
            for name in sorted(models, reverse=repetition % 2 == 1):
                elapsed = milliseconds(models[name], x)
                if repetition >= 2:  # the first ones warm up
                    times.setdefault(name, []).append(elapsed)

    rows: list[dict[str, object]] = []
    for name in models:
        ratios = [a / b for a, b in zip(times[name], times[PEER], strict=True)]
        low, middle, high = _quantiles(ratios)
        p20, p50, p80 = _quantiles(times[name])
        rows.append(
            {
                "contender": name,
                "ms_p20": f"{p20:.2f}",
                "ms_p50": f"{p50:.2f}",
                "ms_p80": f"{p80:.2f}",
                "ms_min": f"{min(times[name]):.2f}",
                "ratio_p20": f"{low:.3f}",
                "ratio_p50": f"{middle:.3f}",
                "ratio_p80": f"{high:.3f}",
                "width": args.width,
                "size": f"{height}x{width}",
                "rounds": args.rounds,
            }
        )
        print(
            f"{name:20s} {p50:9.1f} ms ({p20:.1f} to {p80:.1f})"
            f"   {middle:.3f}x ({low:.3f} to {high:.3f}) {PEER}"
        )
    write_results(args.out, rows, "cpu")


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    """p20, p50, p80"""
    deciles = statistics.quantiles(values, n=10)
    return deciles[1], deciles[4], deciles[7]


if __name__ == "__main__":
    main()
