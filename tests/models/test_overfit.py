"""Both networks with AGC learn eight images by heart, one at a time."""

import pytest
import torch
from torch import Tensor

from deepcontrol import he_init_
from deepcontrol.data.streets import render
from deepcontrol.losses import classes_and_contour_loss, pixel_cross_entropy
from deepcontrol.metrics import ConfusionMatrix
from deepcontrol.models import ClassNet, SegNet


def eight_scenes(height: int, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    scenes = [render(3, index, height, width) for index in range(8)]
    return [
        (
            ((torch.tensor(s.image).permute(2, 0, 1).float() - 127.5) / 64)[None],
            torch.tensor(s.labels)[None],
            torch.tensor(s.instances.astype("int32") * 100 + s.labels)[None],
        )
        for s in scenes
    ]


@pytest.mark.parametrize(
    ("network", "size", "width", "epochs", "rate"),
    [(SegNet, (32, 64), 0.5, 60, 0.02), (ClassNet, (128, 256), 0.5, 60, 0.02)],
)
def test_overfits_eight_images_at_batch_1(
    network: type, size: tuple[int, int], width: float, epochs: int, rate: float
) -> None:
    scenes = eight_scenes(*size)
    model = he_init_(network(19, width=width))
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    error = 1.0
    for epoch in range(epochs):
        matrix = ConfusionMatrix(19)
        for image, labels, segments in scenes:
            output = model(image)
            if isinstance(output, Tensor):
                classes, loss = output, pixel_cross_entropy(output, labels)
            else:
                classes = output.classes
                loss = classes_and_contour_loss(*output, labels, segments)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            matrix.update(classes.argmax(1), labels)
        error = matrix.pixel_error
        if epoch % 5 == 4:
            print(epoch, error, loss.item(), flush=True)
        if error < 0.02:
            break
    assert error < 0.02
