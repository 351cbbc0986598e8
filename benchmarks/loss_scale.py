"""How large is the loss? Class weights of mean 1 weigh a pixel otherwise on each data set.

    python benchmarks/loss_scale.py --data-root CAMVID --out benchmarks/results/loss-scale.csv

A network's first loss is the mean weight of a pixel times the logarithm of the number of classes.
AGC does not divide by what it sees, so for it the scale of the loss is a learning rate: rates of
the paper, which trained on Cityscapes, are compared with those on CamVid by the weights' means.
CamVid's shares of pixels are counted, those of Cityscapes are the published ones.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from deepcontrol.workbench.bench.results import write_rows
from deepcontrol.workbench.data import open_source, prepare
from deepcontrol.workbench.losses import class_weights
from deepcontrol.workbench.sizes import parse_size

# Per cent of the labeled pixels of the 2975 training images, in the order of the class ids: road,
# sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky,
# person, rider, car, truck, bus, train, motorcycle, bicycle.
CITYSCAPES = (
    36.87, 6.08, 22.82, 0.66, 0.88, 1.23, 0.21, 0.55, 15.93, 1.16,
    4.02, 1.22, 0.14, 6.99, 0.27, 0.24, 0.23, 0.10, 0.41,
)  # fmt: skip
HIGHEST = 0.64  # of the rates in the paper's figure 1h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/loss-scale.csv"))
    parser.add_argument("--size", type=parse_size, default=(256, 512))
    flags = parser.parse_args()
    train = prepare(open_source("camvid", "train", flags.data_root), flags.size, Path("out/cache"))
    camvid = scale_of(torch.from_numpy(train.histogram))
    rows = []
    for name, scale, classes in (
        ("camvid", camvid, len(train.classes)),
        ("cityscapes", scale_of(torch.tensor(CITYSCAPES)), len(CITYSCAPES)),
    ):
        rows.append(
            {
                "data": name,
                "classes": classes,
                "mean_weight_of_a_pixel": f"{scale:.3f}",
                "first_loss": f"{scale * math.log(classes):.3f}",
                "rate_0.64_in_terms_of_camvid": f"{HIGHEST * scale / camvid:.3f}",
            }
        )
        print(*rows[-1].values(), sep=", ")
    write_rows(flags.out, rows)


def scale_of(counts: Tensor) -> float:
    """The mean over labeled pixels of the weight of their class."""
    shares = counts.double() / counts.sum()
    return (shares * class_weights(counts).double()).sum().item()


if __name__ == "__main__":
    main()
