"""The confusion matrix against loops, for uneven splits and over processes."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepcontrol.workbench.data.sample import VOID
from deepcontrol.workbench.metrics import ConfusionMatrix, ImageError, ImageErrors
from tests.processes import run_two

CLASSES = 5


def predictions(n: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    predicted = torch.randint(0, CLASSES - 1, (n, 6, 5), generator=rng)
    labels = torch.randint(0, CLASSES - 1, (n, 6, 5), generator=rng)
    labels[torch.rand(labels.shape, generator=rng) < 0.2] = VOID
    return predicted, labels.to(torch.uint8)


def test_against_loops() -> None:
    predicted, labels = predictions()
    matrix = ConfusionMatrix(CLASSES)
    matrix.update(predicted, labels)
    pairs = [
        (t, p)
        for t, p in zip(labels.flatten().tolist(), predicted.flatten().tolist(), strict=True)
        if t != VOID
    ]
    assert matrix.pixel_error == pytest.approx(sum(t != p for t, p in pairs) / len(pairs))
    ious = []
    for c in range(CLASSES - 1):
        both = sum(t == c and p == c for t, p in pairs)
        either = sum(c in (t, p) for t, p in pairs)
        ious.append(both / either)
    assert matrix.class_iou[: CLASSES - 1].tolist() == pytest.approx(ious)
    assert matrix.class_iou[-1].isnan()  # neither labeled nor predicted
    assert matrix.mean_iou == pytest.approx(sum(ious) / len(ious))


def test_uneven_splits_add_up_exactly() -> None:
    predicted, labels = predictions()
    whole, pieces = ConfusionMatrix(CLASSES), ConfusionMatrix(CLASSES)
    whole.update(predicted, labels)
    for part in (slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 7)):
        pieces.update(predicted[part], labels[part])
    assert torch.equal(whole.counts, pieces.counts)


def test_empty_matrix_and_invalid_inputs() -> None:
    matrix = ConfusionMatrix(3)
    assert torch.tensor(matrix.pixel_error).isnan()
    assert torch.tensor(matrix.mean_iou).isnan()
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        matrix.update(torch.zeros(2, 3), torch.zeros(3, 2))
    for predicted, label in ((0, 3), (3, 0), (-1, 1), (3, 2)):
        with pytest.raises(ValueError, match="must be from 0 to 2, or 255"):
            matrix.update(torch.tensor([predicted]), torch.tensor([label]))
    assert not matrix.counts.any()


def test_classes_of_images() -> None:
    matrix = ConfusionMatrix(300, ignored_label=-1)
    labels = torch.tensor([255, 255, 0, -1, 7])
    matrix.update(torch.tensor([255, 0, 0, 255, 8]), labels)
    assert matrix.counts.sum() == 4
    assert matrix.pixel_error == 0.5
    errors = matrix.class_error
    assert [errors[i].item() for i in (255, 0, 7)] == [0.5, 0.0, 1.0]
    assert errors[1].isnan()
    with pytest.raises(ValueError, match="from 0 to 299, or -1"):
        matrix.update(torch.tensor([0]), torch.tensor([300]))


def worker(rank: int, folder: str) -> None:
    predicted, labels = predictions()
    share = slice(0, 2) if rank == 0 else slice(2, 7)
    matrix = ConfusionMatrix(CLASSES)
    matrix.update(predicted[share], labels[share])
    matrix.reduce()
    torch.save(matrix.counts, Path(folder) / f"{rank}.pt")


def test_two_processes_with_uneven_shares(tmp_path: Path) -> None:
    run_two(worker, str(tmp_path))
    whole = ConfusionMatrix(CLASSES)
    whole.update(*predictions())
    for rank in range(2):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), whole.counts)


def test_a_single_predicted_class_is_found() -> None:
    labels = torch.tensor([0, 1, 2, 255])
    for predicted, only in (([2, 2, 2, 0], 2), ([2, 2, 1, 2], None)):
        matrix = ConfusionMatrix(3)
        matrix.update(torch.tensor(predicted), labels)
        assert matrix.only_class == only
    matrix = ConfusionMatrix(3)
    matrix.update(torch.tensor([1, 1]), torch.tensor([1, 1]))  # and it is the only one
    assert matrix.only_class is None


def test_errors_of_images_do_not_depend_on_the_processes() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 4, 6, generator=generator)
    labels = torch.randint(0, 3, (5, 4, 6), generator=generator).to(torch.uint8)
    labels[1] = VOID  # an image without labels has no error
    labels[2, :2] = VOID

    def worst(world: int, batch: int) -> list[ImageError]:
        found = []
        for rank in range(world):
            errors = ImageErrors(VOID, rank, world)
            for start in range(0, 5, batch):
                own = slice(start + rank, min(start + batch, 5), world)
                errors.update(start, logits[own], labels[own])
            found += errors.worst(5)
        return sorted(found, key=lambda image: -image.error)

    one = worst(1, 5)
    assert sorted(image.sample for image in one) == [0, 2, 3, 4]
    for image in one:
        counted = labels[image.sample] != VOID
        wrong = (logits[image.sample].argmax(0) != labels[image.sample])[counted]
        assert math.isclose(image.error, wrong.double().mean())
    assert worst(2, 2) == worst(2, 4) == worst(1, 1) == one


def test_error_of_an_image_with_a_class() -> None:
    errors = ImageErrors(-1)
    errors.update(
        0, torch.log(torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])), torch.tensor([1, 1, -1])
    )
    (first, second) = errors.worst(9)
    assert (first.sample, second.sample) == (0, 1)
    assert math.isclose(first.error, 0.9, rel_tol=1e-6)
