"""Compute the scale of the class-weighted loss on CamVid and on Cityscapes.

    python benchmarks/loss_scale.py --data-root CAMVID --out benchmarks/results/loss-scale.csv

Class weights of mean 1 over the classes give a pixel a different mean weight on each data set. The
initial loss of a network is that mean weight times the logarithm of the number of classes. AGC does
not divide by a measured spread, so for AGC the scale of the loss acts like a learning rate. The
mean weights therefore convert the paper's learning rates, for Cityscapes, to CamVid. CamVid's class
frequencies are counted; those of Cityscapes are the published ones.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from deepcontrol.workbench.bench.results import write_rows
from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.losses import class_weights
from deepcontrol.workbench.terminal import parse_size

# Percentage of the labeled pixels of the 2975 training images, in the order of the class ids: road,
# sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky,
# person, rider, car, truck, bus, train, motorcycle, bicycle.
CITYSCAPES = (
    36.87, 6.08, 22.82, 0.66, 0.88, 1.23, 0.21, 0.55, 15.93, 1.16,
    4.02, 1.22, 0.14, 6.99, 0.27, 0.24, 0.23, 0.10, 0.41,
)  # fmt: skip
HIGHEST_LR = 0.64  # in the paper's figure 1h


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CamVid")
    parser.add_argument("--out", type=Path, default=Path("out/loss-scale.csv"), help="CSV file")
    parser.add_argument("--size", type=parse_size, default=(256, 512), help="image size, HxW")
    flags = parser.parse_args()
    train = prepare(open_source("camvid", "train", flags.data_root), flags.size, Path("out/cache"))
    camvid = mean_pixel_weight(torch.from_numpy(train.histogram))
    rows = []
    for name, scale, classes in (
        ("camvid", camvid, len(train.classes)),
        ("cityscapes", mean_pixel_weight(torch.tensor(CITYSCAPES)), len(CITYSCAPES)),
    ):
        rows.append(
            {
                "data": name,
                "classes": classes,
                "mean_weight_of_a_pixel": f"{scale:.3f}",
                "first_loss": f"{scale * math.log(classes):.3f}",
                "rate_0.64_in_terms_of_camvid": f"{HIGHEST_LR * scale / camvid:.3f}",
            }
        )
        print(*rows[-1].values(), sep=", ")
    write_rows(flags.out, rows)


def mean_pixel_weight(counts: Tensor) -> float:
    """Return the mean class weight over the labeled pixels."""
    shares = counts.double() / counts.sum()
    return (shares * class_weights(counts).double()).sum().item()


if __name__ == "__main__":
    main()
