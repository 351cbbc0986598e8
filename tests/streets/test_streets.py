"""Street scenes are reproducible to the byte, labeled correctly, varied and not trivial."""

import hashlib
import time
from functools import lru_cache

import numpy as np
import pytest

from deepcontrol.workbench.data import sample
from deepcontrol.workbench.data.road_scenes import CLASSES, PALETTE
from streets import VOID, Class, Scene, render

THINGS = range(CLASSES.index("person"), len(CLASSES))
SMALL = (64, 128)

# Digest of image, labels and instances by (seed, index, height, width). Update the digests only if
# the images change on purpose; any other change is a loss of reproducibility.
GOLDEN = {
    (0, 0, 256, 512): "7208847d622fbcaad81d770844cdd905d671e96c764a9b1f4c710e34a8c20f2f",
    (0, 7, 256, 512): "c5d07d7509b3f81fe809dde3d467f372295fa8612501bd7b2f3e27b101ce345c",
    (1, 123456, 64, 128): "6fb50cc3a2fc71b8250109b0cad70d2f9de72b9bde0a295798e0d2d2837d74ba",
    (2**40, 3, 97, 131): "c051299007ef95d1fd10b3b8312c2a2eba68cc3dd1c1673339124250398bd584",
}


@lru_cache(maxsize=1)
def small_scenes() -> list[Scene]:
    return [render(3, index, *SMALL) for index in range(200)]


def digest(scene: Scene) -> str:
    state = hashlib.sha256()
    state.update(scene.image.tobytes())
    state.update(scene.labels.tobytes())
    state.update(scene.instances.astype("<u2").tobytes())
    return state.hexdigest()


def test_classes_are_the_training_ids_of_cityscapes() -> None:
    assert len(CLASSES) == len(PALETTE) == 19
    assert tuple(c.name.lower().replace("_", " ") for c in Class) == CLASSES
    assert CLASSES[0] == "road"
    assert CLASSES[10] == "sky"
    assert CLASSES[18] == "bicycle"
    assert VOID == sample.VOID == 255


def test_rendering_twice_gives_the_same_sample() -> None:
    first, second = render(4, 9), render(4, 9)
    np.testing.assert_array_equal(first.image, second.image)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(first.instances, second.instances)


def test_samples_do_not_depend_on_earlier_calls() -> None:
    alone = digest(render(4, 1, *SMALL))
    render(5, 1, 48, 48)
    assert digest(render(4, 1, *SMALL)) == alone


def test_index_and_seed_change_the_sample() -> None:
    base = digest(render(4, 9, *SMALL))
    assert digest(render(4, 10, *SMALL)) != base
    assert digest(render(5, 9, *SMALL)) != base
    assert digest(render(9, 4, *SMALL)) != base


@pytest.mark.parametrize(("sample", "expected"), GOLDEN.items())
def test_samples_match_golden_digests(sample: tuple[int, int, int, int], expected: str) -> None:
    assert digest(render(*sample)) == expected


@pytest.mark.parametrize(
    ("height", "width"), [(256, 512), (33, 47), (32, 32), (200, 64), (41, 333)]
)
def test_shapes_and_types(height: int, width: int) -> None:
    scene = render(6, 2, height, width)
    assert scene.image.shape == (height, width, 3)
    assert scene.labels.shape == scene.instances.shape == (height, width)
    assert scene.image.dtype == scene.labels.dtype == np.uint8
    assert scene.instances.dtype == np.uint16
    assert scene.image.std() > 5


def test_labels_are_train_ids_or_void() -> None:
    for scene in small_scenes():
        values = np.unique(scene.labels)
        assert set(values.tolist()) <= {*range(len(CLASSES)), VOID}


def test_instances_cover_people_and_vehicles_and_have_one_class_each() -> None:
    for scene in small_scenes()[:60]:
        np.testing.assert_array_equal(scene.instances > 0, np.isin(scene.labels, THINGS))
        owned = scene.instances > 0
        pairs = np.unique(np.stack((scene.instances[owned], scene.labels[owned])), axis=1)
        numbers = pairs[0].tolist()
        assert numbers == list(range(1, len(numbers) + 1))


def test_riders_come_with_their_vehicles() -> None:
    bicycle, motorcycle = CLASSES.index("bicycle"), CLASSES.index("motorcycle")
    scenes = [scene for scene in small_scenes() if (scene.labels == CLASSES.index("rider")).any()]
    ridden = [np.isin(scene.labels, (bicycle, motorcycle)).any() for scene in scenes]
    assert len(scenes) > 20
    assert np.mean(ridden) > 0.6


def test_every_class_appears_in_five_percent_of_the_scenes() -> None:
    seen = np.zeros(256)
    for scene in small_scenes():
        seen[np.unique(scene.labels)] += 1
    share = dict(zip(CLASSES, (seen[: len(CLASSES)] / len(small_scenes())).tolist(), strict=True))
    assert {name: value for name, value in share.items() if value < 0.05} == {}
    assert 0.05 < seen[VOID] / len(small_scenes()) < 0.6


def test_class_frequencies_are_plausible() -> None:
    pixels = sum(np.bincount(scene.labels.reshape(-1), minlength=256) for scene in small_scenes())
    share = pixels / np.sum(pixels)
    assert 0.25 < share[CLASSES.index("road")] < 0.45
    assert 0.12 < share[CLASSES.index("building")] < 0.32
    assert 0.08 < share[CLASSES.index("vegetation")] < 0.24
    assert 0.03 < share[CLASSES.index("car")] < 0.14


def bins_and_labels(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    coarse = (scene.image >> 4).astype(np.int64)
    bins = (coarse[..., 0] * 16 + coarse[..., 1]) * 16 + coarse[..., 2]
    known = scene.labels != VOID
    return bins[known], scene.labels[known].astype(np.int64)


def test_single_pixel_classifier_fails() -> None:
    scenes = small_scenes()[:90]
    counts = np.zeros((16**3, len(CLASSES)), dtype=np.int64)
    for scene in scenes[:60]:
        np.add.at(counts, bins_and_labels(scene), 1)
    guess = np.where(counts.sum(1) > 0, counts.argmax(1), counts.sum(0).argmax())
    wrong = total = 0
    for scene in scenes[60:]:
        bins, labels = bins_and_labels(scene)
        wrong += int((guess[bins] != labels).sum())
        total += len(labels)
    assert wrong / total > 0.35


def test_rendering_takes_less_than_a_fifth_of_a_second() -> None:
    render(8, 0)
    start = time.perf_counter()
    for index in range(10):
        render(8, index)
    assert (time.perf_counter() - start) / 10 < 0.2


def test_errors_contain_the_invalid_values() -> None:
    with pytest.raises(ValueError, match="16x512"):
        render(0, 0, 16, 512)
    with pytest.raises(ValueError, match="256x31"):
        render(0, 0, 256, 31)
    with pytest.raises(ValueError, match="-3"):
        render(0, -3)
