"""SegNet and ClassNet with AGC overfit eight pictures at batch size 1."""

import pytest
import torch
from torch import Tensor

from deepcontrol import he_init_
from deepcontrol.workbench.losses import classes_and_contour_loss, pixel_cross_entropy
from deepcontrol.workbench.metrics import ConfusionMatrix
from deepcontrol.workbench.models import ClassNet, SegNet

CLASSES = 14


def picture(rng: torch.Generator, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw five overlapping rectangles of three classes: image, labels and segments, batch size 1.

    Colors are independent of classes, so that a classifier of single pixels cannot succeed.
    """

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    image = torch.zeros(3, side, side)
    labels = torch.zeros(side, side, dtype=torch.uint8)
    segments = torch.zeros(side, side, dtype=torch.int32)
    for number in range(1, 6):
        height, width = integer(side // 8, side // 2), integer(side // 8, side // 2)
        top, left = integer(0, side - height), integer(0, side - width)
        window = (slice(top, top + height), slice(left, left + width))
        labels[window], segments[window] = integer(1, 4), number
        image[:, *window] = 1.5 * torch.randn(3, 1, 1, generator=rng)
    image += 0.1 * torch.randn(3, side, side, generator=rng)
    return image[None], labels[None], segments[None]


@pytest.mark.slow
# At 128x128 the deepest feature maps of ClassNet have one position, which this test does not need.
@pytest.mark.filterwarnings("ignore:AGCConv2d got maps of one position")
@pytest.mark.parametrize(("network", "side"), [(SegNet, 64), (ClassNet, 128)])
def test_overfits_eight_pictures_at_batch_1(network: type, side: int) -> None:
    rng = torch.Generator().manual_seed(0)
    pictures = [picture(rng, side) for _ in range(8)]
    model = he_init_(network(CLASSES, width=0.25), rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    error = 1.0
    for _ in range(100):
        matrix = ConfusionMatrix(CLASSES)
        for image, labels, segments in pictures:
            output = model(image)
            if isinstance(output, Tensor):
                classes, loss = output, pixel_cross_entropy(output, labels)
            else:
                classes = output.classes
                loss = classes_and_contour_loss(*output, labels, segments)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            matrix.update(classes.argmax(1), labels)
        error = matrix.pixel_error
        if error < 0.02:
            break
    assert error < 0.02
