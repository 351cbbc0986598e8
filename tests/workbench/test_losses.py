"""Losses against simple implementations with loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from deepcontrol.workbench.data.sample import NO_CLASS, VOID
from deepcontrol.workbench.losses import (
    boundaries,
    class_cross_entropy,
    class_weights,
    classes_and_contour_loss,
    contour_loss,
    pixel_cross_entropy,
)


def labels_with_void(*shape: int, classes: int = 4) -> Tensor:
    labels = torch.randint(0, classes, shape, dtype=torch.uint8)
    labels[torch.rand(shape) < 0.2] = VOID
    return labels


@pytest.mark.parametrize("weighted", [True, False])
def test_cross_entropy_against_loops(weighted: bool) -> None:
    logits = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    labels = labels_with_void(2, 5, 3)
    weights = torch.rand(4, dtype=torch.float64) if weighted else None
    total, pixels = 0.0, 0
    for n in range(2):
        for y in range(5):
            for x in range(3):
                c = int(labels[n, y, x])
                if c == VOID:
                    continue
                z = logits[n, :, y, x].tolist()
                w = 1.0 if weights is None else weights[c].item()
                total += w * (math.log(sum(math.exp(v) for v in z)) - z[c])
                pixels += 1
    assert 0 < pixels < labels.numel()
    assert pixel_cross_entropy(logits, labels, weights).item() == pytest.approx(total / pixels)


def test_cross_entropy_with_both_memory_formats() -> None:
    logits, labels, weights = torch.randn(2, 4, 5, 3), labels_with_void(2, 5, 3), torch.rand(4)
    expected = pixel_cross_entropy(logits, labels, weights)
    last = logits.to(memory_format=torch.channels_last).requires_grad_()
    found = pixel_cross_entropy(last, labels, weights)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found, last)
    logits.requires_grad_()
    (exact,) = torch.autograd.grad(pixel_cross_entropy(logits, labels, weights), logits)
    torch.testing.assert_close(grad, exact)
    for wrong in (labels.mT, labels[:, None], labels[:1]):
        for any_layout in (logits, last):
            with pytest.raises(ValueError, match=r"\(2, 4, 5, 3\) for labels of"):
                pixel_cross_entropy(any_layout, wrong)


def test_loss_is_not_divided_by_the_weights() -> None:
    """If all pixels have weight 3, the loss is three times the plain loss."""
    logits, labels = torch.randn(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.uint8)
    plain = pixel_cross_entropy(logits, labels)
    weighted = pixel_cross_entropy(logits, labels, torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(weighted, 3 * plain)


def test_void_pixels_have_zero_loss_and_gradient() -> None:
    logits = torch.randn(2, 3, 8, 8, requires_grad=True)
    contour = torch.randn(2, 1, 8, 8, requires_grad=True)
    void = torch.full((2, 8, 8), VOID, dtype=torch.uint8)
    segments = torch.randint(0, 9, (2, 8, 8)).to(torch.uint16)
    loss = classes_and_contour_loss(logits, contour, void, segments)
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()
    assert not contour.grad.any()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(1, 3, 256, 256).bfloat16()
    labels = labels_with_void(1, 256, 256, classes=3)
    loss = pixel_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    exact = pixel_cross_entropy(logits.double(), labels)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)


def test_enet_weights() -> None:
    counts = torch.tensor([5_000_000, 40_000, 1, 0])
    weights = class_weights(counts)
    p = counts.double() / counts.sum()
    raw = [1 / math.log(1.02 + v) for v in p[:3]]
    mean = sum(raw) / 3
    torch.testing.assert_close(weights, torch.tensor([*(r / mean for r in raw), 1.0]))
    assert weights[:3].mean().item() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"\[0, 0\]"):
        class_weights(torch.tensor([0, 0]))


def slow_boundaries(segments: Tensor, labels: Tensor) -> Tensor:
    found = torch.zeros(segments.shape, dtype=torch.bool)
    n_samples, height, breadth = segments.shape
    for n in range(n_samples):
        for y in range(height):
            for x in range(breadth):
                for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                    v, u = y + dy, x + dx
                    if not (0 <= v < height and 0 <= u < breadth):
                        continue
                    void = VOID in (int(labels[n, y, x]), int(labels[n, v, u]))
                    if not void and int(segments[n, y, x]) != int(segments[n, v, u]):
                        found[n, y, x] = True
    return found


def scene(n: int = 2, height: int = 14, breadth: int = 17) -> tuple[Tensor, Tensor]:
    """Make segments with ids beyond int16, as in Cityscapes, and labels with void."""
    segments = torch.full((n, height, breadth), 7)
    segments[:, 2:5, 3:9] = 33_001
    segments[0, 9:12, 10:] = 26_002
    labels = (segments % 3).to(torch.uint8)
    labels[:, 4, :] = VOID
    labels[1, :, 5:7] = VOID
    return segments.to(torch.uint16), labels


def test_boundaries_against_loops() -> None:
    segments, labels = scene()
    expected = slow_boundaries(segments, labels)
    assert expected.any()
    assert torch.equal(boundaries(segments, labels), expected)


@pytest.mark.parametrize("radius", [1, 3])
def test_contour_loss_against_loops(radius: int) -> None:
    segments, labels = scene()
    logits = torch.randn(2, 1, *segments.shape[1:], dtype=torch.float64)
    edge = slow_boundaries(segments, labels)
    losses = []
    for n in range(2):
        points = edge[n].nonzero().tolist()
        both = either = 0.0
        for y in range(segments.shape[1]):
            for x in range(segments.shape[2]):
                close = any(abs(y - v) <= radius and abs(x - u) <= radius for v, u in points)
                if int(labels[n, y, x]) == VOID or not close:
                    continue
                p, t = torch.sigmoid(logits[n, 0, y, x]).item(), float(edge[n, y, x])
                both += p * t
                either += p + t - p * t
        losses.append(1 - both / either)
    assert contour_loss(logits, segments, labels, radius).item() == pytest.approx(sum(losses) / 2)


def test_contour_loss_gradients() -> None:
    segments, labels = scene(height=8, breadth=9)
    logits = torch.randn(2, 1, 8, 9, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a: contour_loss(a, segments, labels, radius=1), logits)


def test_contour_loss_limits() -> None:
    segments, labels = scene()
    edge = boundaries(segments, labels)[:, None]
    assert contour_loss(torch.where(edge, 50.0, -50.0), segments, labels) < 1e-6
    assert contour_loss(torch.where(edge, -50.0, 50.0), segments, labels) > 0.999
    one = torch.ones_like(segments)
    blank = torch.zeros_like(labels)
    assert contour_loss(torch.randn(2, 1, 14, 17), one, blank) == 0


def test_classnet_loss_is_the_sum() -> None:
    segments, labels = scene()
    classes, contour = torch.randn(2, 3, 14, 17), torch.randn(2, 1, 14, 17)
    weights = torch.rand(3)
    expected = pixel_cross_entropy(classes, labels, weights) + contour_loss(
        contour, segments, labels
    )
    loss = classes_and_contour_loss(classes, contour, labels, segments, weights)
    torch.testing.assert_close(loss, expected)


def test_class_cross_entropy_ignores_images_without_a_class() -> None:
    logits = torch.randn(5, 300, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([255, NO_CLASS, 0, 299, NO_CLASS])  # 255 is a class here
    kept = [i for i in range(5) if labels[i] != NO_CLASS]
    expected = sum(-math.log(logits[i].softmax(0)[labels[i]].item()) for i in kept) / len(kept)
    assert class_cross_entropy(logits, labels).item() == pytest.approx(expected)
    assert gradcheck(lambda a: class_cross_entropy(a, labels), logits)
    assert class_cross_entropy(logits, torch.full((5,), NO_CLASS)) == 0
    assert class_cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
    with pytest.raises(ValueError, match=r"\(5, 300\).*\(4,\)"):
        class_cross_entropy(logits, labels[:4])
