"""Batches of classified images: augmentation, chunks, processes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from deepcontrol.workbench.data import NO_CLASS, Batch, Cache, ClassificationBatches, CropFlip
from deepcontrol.workbench.data.batches import PIXEL_MEAN, PIXEL_STD, crop_and_flip

COUNT, CLASSES = 23, 5


def cache(channels: int = 3) -> Cache:
    rng = np.random.default_rng(0)
    return Cache(
        name="noise",
        classes=tuple("abcde"),
        palette=((0, 0, 0),) * CLASSES,
        images=rng.integers(0, 256, (COUNT, 8, 16, channels), np.uint8),
        labels=rng.integers(0, CLASSES, COUNT).astype(np.int16),
        segments=np.zeros(COUNT, np.uint16),
        histogram=np.ones(CLASSES, np.int64),
    )


def batches(batch_size: int = 4, **settings: object) -> ClassificationBatches:
    shared = {"crop_flip": CropFlip((2, 3)), "seed": 5}
    return ClassificationBatches(cache(), batch_size, **(shared | settings))  # type: ignore[arg-type]


def assert_equal(found: Iterator[Batch], expected: Iterator[Batch]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)


def cropped(image: np.ndarray, top: int, left: int, flip: bool) -> np.ndarray:
    """Pad with zeros by the largest shift, crop, flip: pixel by pixel what a user expects."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((9, 9), (9, 9), (0, 0)))
    crop = padded[9 + top : 9 + top + height, 9 + left : 9 + left + width]
    return crop[:, ::-1] if flip else crop


def test_augmented_images_equal_the_plain_reference() -> None:
    data = batches(chunk_images=8)
    views = data.crop_flip.views(5, 3, COUNT)  # type: ignore[union-attr]
    found = list(data.epoch(3))
    images = torch.cat([batch.images for batch in found])
    labels = torch.cat([batch.labels for batch in found])
    assert labels.dtype == torch.int64
    for place, index in enumerate(data.order(3)):
        expected = cropped(
            data.dataset.images[index],
            int(views.top[index]),
            int(views.left[index]),
            bool(views.flip[index]),
        )
        pixels = images[place].permute(1, 2, 0) * PIXEL_STD + PIXEL_MEAN
        assert np.array_equal(pixels.round().to(torch.uint8).numpy(), expected)
        assert labels[place] == data.dataset.labels[index]


def test_views_are_uniform_and_differ_between_epochs() -> None:
    count = 20_000
    views = CropFlip((4, 2)).views(0, 1, count)
    for drawn, values in (
        (views.top, range(-4, 5)),
        (views.left, range(-2, 3)),
        (views.flip, (0, 1)),
    ):
        found, counts = np.unique(drawn, return_counts=True)
        assert found.tolist() == list(values)
        expected = count / len(found)
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))  # five sigma
    assert abs(np.corrcoef(views.top, views.left)[0, 1]) < 0.04
    for other in (CropFlip((4, 2)).views(0, 2, count), CropFlip((4, 2)).views(1, 1, count)):
        assert (other.top == views.top).mean() < 0.2
    assert np.array_equal(CropFlip((4, 2)).views(0, 1, 7).top, views.top[:7])


def test_view_without_flip_or_padding_is_the_image() -> None:
    views = CropFlip(flip=False).views(0, 1, COUNT)
    assert not any(v.any() for v in views)
    data = batches(crop_flip=CropFlip(flip=False))
    plain = batches(crop_flip=None).samples(data.order(2))
    assert torch.equal(torch.cat([b.images for b in data.epoch(2)]), plain.images)


@pytest.mark.parametrize("batch_size", [1, 4, 23, 40])
@pytest.mark.parametrize("augmented", [False, True])
def test_chunks_and_workers_do_not_change_batches(batch_size: int, augmented: bool) -> None:
    kind = {} if augmented else {"crop_flip": None}
    expected = list(batches(batch_size, chunk_images=1, **kind).epoch(2))
    assert len(expected) == len(batches(batch_size)) == -(-COUNT // batch_size)
    for chunk_images, workers in ((3, 0), (8, 2), (1024, 0), (1024, 1)):
        data = batches(batch_size, chunk_images=chunk_images, workers=workers, **kind)
        assert_equal(data.epoch(2), iter(expected))
        for start in (1, len(expected) - 1, len(expected), len(expected) + 2):
            assert_equal(data.epoch(2, start), iter(expected[start:]))


def test_evaluation_is_in_order() -> None:
    data = batches(crop_flip=None)
    labels = torch.cat([batch.labels for batch in data.epoch(7)])
    assert labels.tolist() == data.dataset.labels.tolist()


def test_epochs_have_all_samples_in_another_order() -> None:
    data = batches()
    assert sorted(data.order(1)) == sorted(data.order(2)) == list(range(COUNT))
    assert data.order(1) != data.order(2)


@pytest.mark.parametrize(("batch_size", "world"), [(4, 2), (5, 2), (4, 3), (1, 2), (22, 2), (2, 5)])
def test_processes_share_each_batch(batch_size: int, world: int) -> None:
    whole = list(batches(batch_size).epoch(1))
    parts = [
        list(batches(batch_size, rank=rank, world=world, chunk_images=6).epoch(1))
        for rank in range(world)
    ]
    for number, batch in enumerate(whole):
        size = len(batch.labels)
        for rank in range(world):
            own = parts[rank][number]
            if rank < size:
                assert torch.equal(own.images, batch.images[rank::world])
                assert torch.equal(own.labels, batch.labels[rank::world])
            else:
                assert torch.equal(own.images, batch.images[:1])
                assert own.labels.tolist() == [NO_CLASS]
    assert {len(p) for p in parts} == {len(whole)}


def test_gray_images() -> None:
    data = ClassificationBatches(cache(channels=1), 4, crop_flip=CropFlip((1, 1)))
    assert next(iter(data.epoch(1))).images.shape == (4, 1, 8, 16)


def test_crop_and_flip_by_hand() -> None:
    image = torch.arange(1, 7, dtype=torch.uint8).reshape(1, 2, 3, 1)

    def found(top: int, left: int, flip: bool) -> list[list[int]]:
        numbers: list[Tensor] = [torch.tensor([value]) for value in (top, left, flip)]
        return crop_and_flip(image, *numbers)[0, :, :, 0].tolist()

    assert found(0, 0, False) == [[1, 2, 3], [4, 5, 6]]
    assert found(1, 0, False) == [[4, 5, 6], [0, 0, 0]]
    assert found(0, -1, False) == [[0, 1, 2], [0, 4, 5]]
    assert found(0, -1, True) == [[2, 1, 0], [5, 4, 0]]


def test_negative_start_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        next(batches().epoch(1, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("device_share", [0.4, 0.0])  # 0: the cache stays on the host
def test_batches_on_a_gpu_are_those_of_the_cpu(device_share: float) -> None:
    data = batches(device="cuda", device_share=device_share, chunk_images=8)
    assert data.on_device == (device_share > 0)
    for found, expected in zip(data.epoch(2), batches().epoch(2), strict=True):
        assert torch.equal(found.images.cpu(), expected.images)
        assert torch.equal(found.labels.cpu(), expected.labels)
