"""Batches and augmentation depend only on (seed, epoch, index)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from deepcontrol.workbench.data import VOID, Augment, Batches, Cache, open_source, prepare
from deepcontrol.workbench.data.augment import View, apply_views
from deepcontrol.workbench.data.batches import PIXEL_MEAN, PIXEL_STD, prefetch

EVERYTHING = Augment(scale=(0.7, 1.6), color=0.3)


@pytest.fixture
def cache(camvid_root: Path, tmp_path: Path) -> Cache:
    return prepare(open_source("camvid", "train", camvid_root), (24, 32), tmp_path / "cache")


def test_evaluation_reads_every_image_whole_and_in_order(cache: Cache) -> None:
    batches = list(Batches(cache, 4).epoch())
    assert [len(b.images) for b in batches] == [4, 2]
    images = torch.cat([b.images for b in batches])
    restored = (images * PIXEL_STD + PIXEL_MEAN).permute(0, 2, 3, 1)
    torch.testing.assert_close(restored, torch.from_numpy(cache.images).float())
    assert torch.equal(torch.cat([b.labels for b in batches]), torch.from_numpy(cache.labels))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_epochs_are_different_permutations(cache: Cache) -> None:
    batches = Batches(cache, 4, size=(16, 16), augment=Augment(), seed=3)
    orders = [batches.order(epoch) for epoch in range(5)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert Batches(cache, 2, augment=Augment(), seed=3).order(1) == orders[1]
    assert any(
        Batches(cache, 2, augment=Augment(), seed=s).order(1) != orders[1] for s in range(4, 8)
    )


def test_view_depends_only_on_seed_epoch_and_index(cache: Cache) -> None:
    """The batch size and the first batch do not change the view of a sample."""

    def seen(batch_size: int, start: int = 0, epoch: int = 2) -> dict[int, torch.Tensor]:
        batches = Batches(cache, batch_size, size=(16, 16), augment=EVERYTHING, seed=5)
        images = torch.cat([b.images for b in batches.epoch(epoch, start)])
        order = batches.order(epoch)[start * batch_size :]
        return dict(zip(order, images, strict=True))

    batch = next(Batches(cache, 3, size=(16, 16), augment=EVERYTHING).epoch())
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert (batch.labels.dtype, batch.segments.dtype) == (torch.uint8, torch.int16)
    whole = seen(1)
    for other in (seen(3), seen(6), seen(1, start=4)):
        for index, image in other.items():
            torch.testing.assert_close(image, whole[index])
    next_epoch = seen(1, epoch=3)
    assert not any(torch.equal(next_epoch[i], whole[i]) for i in whole)


def test_images_labels_and_segments_are_transformed_alike() -> None:
    """An image with its labels as pixel values still matches them after augmentation."""
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 12, (8, 20, 30), np.uint8))
    segments = labels.to(torch.int16) + 100
    images = labels[..., None].expand(8, 20, 30, 3)
    augment = Augment()
    views = [augment.view(1, 2, i, (20, 30), (13, 17)) for i in range(8)]
    assert {v.flip for v in views} == {True, False}
    assert len({(v.top, v.left) for v in views}) > 4
    a, b, c = apply_views(images, labels, segments, views, (13, 17))
    assert b.shape == (8, 13, 17)
    assert torch.equal(a[..., 0], b.float())
    assert torch.equal(c, b.to(torch.int16) + 100)
    for view, shown, original in zip(views, b, labels, strict=True):
        top, left = int(view.top), int(view.left)
        window = original[top : top + 13, left : left + 17]
        assert torch.equal(shown, window.flip(1) if view.flip else window)


def test_zoom_by_two_repeats_each_pixel() -> None:
    labels = torch.arange(24, dtype=torch.uint8).reshape(1, 4, 6)
    images = labels[..., None].expand(1, 4, 6, 3)
    segments = labels.to(torch.int16)
    _, shown, _ = apply_views(images, labels, segments, [View(zoom=2.0)], (8, 12))
    assert torch.equal(shown[0], labels[0].repeat_interleave(2, 0).repeat_interleave(2, 1))
    image, mirrored, _ = apply_views(images, labels, segments, [View(zoom=2.0, flip=True)], (8, 12))
    assert torch.equal(mirrored[0], shown[0].flip(1))
    # Bilinear between pixels; the border value at the border.
    assert image[0, 0, -1, 0] == 0
    assert image[0, 1, -2, 0] == pytest.approx(0.25 + 6 * 0.25)


def test_pixels_outside_of_the_image_are_void() -> None:
    labels = torch.ones(1, 4, 4, dtype=torch.uint8)
    images = torch.full((1, 4, 4, 3), 7, dtype=torch.uint8)
    view = Augment(scale=(0.5, 0.5)).view(0, 0, 0, (4, 4), (4, 4))
    image, shown, segments = apply_views(images, labels, labels.to(torch.int16), [view], (4, 4))
    assert (shown == 1).sum() == 4
    assert (shown == VOID).sum() == 12
    assert (segments[shown == VOID] == 0).all()
    assert (image == 7).all()


def test_color_jitter_changes_only_images(cache: Cache) -> None:
    plain, colored = (
        next(iter(Batches(cache, 6, augment=a, seed=1).epoch()))
        for a in (Augment(), Augment(color=0.5))
    )
    assert torch.equal(plain.labels, colored.labels)
    assert not torch.allclose(plain.images, colored.images, atol=0.1)
    low, high = (0 - PIXEL_MEAN) / PIXEL_STD, (255 - PIXEL_MEAN) / PIXEL_STD
    assert colored.images.min() >= low
    assert colored.images.max() <= high


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: Batches(c, 0), "at least 1, got 0"),
        (lambda c: Batches(c, 1, size=(48, 64), augment=Augment()), r"\(48, 64\).*\(24, 32\)"),
        (lambda c: Batches(c, 1, size=(8, 8)), r"size \(8, 8\) needs augment"),
        (lambda c: next(Batches(c, 1).epoch(0, start=-1)), "start must be at least 0, got -1"),
        (lambda c: Augment(scale=(2.0, 1.0)), r"0 < low <= high, got \(2.0, 1.0\)"),
        (lambda c: Augment(color=1.5), "got 1.5"),
    ],
)
def test_invalid_settings_raise(cache: Cache, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(cache)


@pytest.mark.parametrize("workers", [0, 1, 3])
def testprefetch_keeps_the_order_and_raises_errors(workers: int) -> None:
    assert list(prefetch(str, range(10), workers)) == [str(i) for i in range(10)]

    def halves(n: int) -> float:
        if n == 4:
            raise OSError("the disk is gone")
        return n / 2

    stream = prefetch(halves, range(10), workers)
    assert [next(stream) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    endless = prefetch(str, itertools.count(), workers)
    assert next(endless) == "0"
    endless.close()  # must not hang


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_batches(cache: Cache, workers: int) -> None:
    alone, helped = (
        list(Batches(cache, 2, augment=EVERYTHING, seed=5, workers=n).epoch(3, start=1))
        for n in (0, workers)
    )
    for a, b in zip(alone, helped, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world", [2, 4, 5])
def test_processes_split_each_batch(cache: Cache, world: int) -> None:
    """6 images in batches of 4: the second batch has 2 images, fewer than some processes."""
    whole = list(Batches(cache, 4, augment=EVERYTHING).epoch(1))
    parts = [
        list(Batches(cache, 4, augment=EVERYTHING, rank=r, world=world).epoch(1))
        for r in range(world)
    ]
    for number, batch in enumerate(whole):
        own = [parts[r][number] for r in range(world)]
        for i in range(len(batch.images)):
            torch.testing.assert_close(own[i % world].images[i // world], batch.images[i])
            assert torch.equal(own[i % world].labels[i // world], batch.labels[i])
        for r in range(world):
            assert len(own[r].images) >= 1
            if r >= len(batch.images):
                assert (own[r].labels == VOID).all()
        labeled = sum(int((part.labels != VOID).sum()) for part in own)
        assert labeled == (batch.labels != VOID).sum()


@pytest.mark.gpu
def test_gpu_batches_match_cpu_batches(cache: Cache) -> None:
    kwargs = {"size": (16, 16), "augment": EVERYTHING, "seed": 5}
    expected = list(Batches(cache, 4, **kwargs).epoch(1))
    for share in (0.4, 0.0):  # cached on the device; prefetched from host memory
        batches = Batches(cache, 4, device="cuda", device_share=share, **kwargs)
        assert batches.on_device == (share > 0)
        for a, b in zip(batches.epoch(1), expected, strict=True):
            torch.testing.assert_close(a.images.cpu(), b.images, rtol=1e-4, atol=1e-4)
            assert torch.equal(a.labels.cpu(), b.labels)
            assert torch.equal(a.segments.cpu(), b.segments)
