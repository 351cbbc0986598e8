"""Inference of SegNet on a CPU: AGC (automatic gain control) folded beside BatchNorm folded.

Both networks run at batch 1 in fp32, in eval mode. BatchNorm is folded by torch's own
fuse_conv_bn_eval, so its network is convolutions with constant biases and ReLUs; AGC by
deepcontrol.fold, so its biases are computed. All contenders take turns in one run, so that whatever
else the machine does hits all of them; the ratio is taken within each turn, whose order alternates.
With one thread, the default, the time is what that thread ran for: waiting for a core is not in it.
With more it is the clock on the wall, which needs a machine that does nothing else.

    python benchmarks/fold.py [--rounds 30] [--threads 1] [--out benchmarks/results/fold-cpu.csv]
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


def batchnorm_folded(model: nn.Module) -> nn.Module:
    """Each convolution and the BatchNorm behind it as one convolution."""
    for row in model.modules():
        if isinstance(row, nn.Sequential) and len(row) > 1 and isinstance(row[1], nn.BatchNorm2d):
            convolution = row[0]
            assert isinstance(convolution, nn.Conv2d)
            row[0], row[1] = fuse_conv_bn_eval(convolution, row[1]), nn.Identity()
    return model


def contenders(width: float, x: Tensor) -> dict[str, nn.Module]:
    agc = SegNet(19, width=width, norm="agc").eval()
    batchnorm = SegNet(19, width=width, norm="bn").eval()
    folded = fold(agc)
    # Not all of it: where two values of a pooling's window are equal up to rounding, either may be
    # the maximum, and the unpooling then puts a value a pixel further (1 window in a million).
    same = torch.isclose(folded(x), agc(x), rtol=1e-4, atol=1e-5).double().mean()
    if same < 0.9:
        raise RuntimeError(f"folding changed the outputs: {same:.1%} of them are the same")
    return {
        PEER: batchnorm_folded(batchnorm),
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
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contender, from 2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=float, default=1.0, help="scales SegNet's inner widths")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 512), metavar=("H", "W"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fold-cpu.csv"))
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
        for turn in range(args.rounds + 2):
            for name in sorted(models, reverse=turn % 2 == 1):
                elapsed = milliseconds(models[name], x)
                if turn >= 2:  # the first turns warm up
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
