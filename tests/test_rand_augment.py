"""X-VLM's augmentation: windows by area and shape, ten operations, two of which are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from diptych.data.augmentation import ASPECTS, OPERATIONS, RandAugment, random_window
from diptych.data.images import PixelInput
from diptych.parts import describe


def picture(width: int = 24, height: int = 18) -> Image.Image:
    values = np.random.default_rng(0).integers(40, 200, (height, width, 3))
    return Image.fromarray(values.astype(np.uint8))


def test_windows_have_the_published_areas_and_shapes() -> None:
    rng = np.random.default_rng(1)
    shares, ratios = [], []
    for _ in range(2000):
        left, top, right, bottom = random_window((400, 300), (0.5, 1.0), rng)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / (400 * 300))
        ratios.append((right - left) / (bottom - top))
    assert 0.49 < min(shares) < 0.53
    assert max(shares) <= 1
    assert ASPECTS[0] - 0.01 < min(ratios) < 0.8
    assert 1.3 < max(ratios) < ASPECTS[1] + 0.01


@pytest.mark.parametrize(("size", "window"), [((100, 10), (43, 0, 56, 10)), ((10, 100), (0, 43, 10, 56))])
def test_a_narrow_picture_gives_its_middle(size: tuple[int, int], window: tuple[int, ...]) -> None:
    assert random_window(size, (1.0, 1.0), np.random.default_rng(0)) == window


def test_operations_move_as_far_as_stated() -> None:
    plain = picture()
    pixels = np.asarray(plain).astype(int)
    moved = np.asarray(OPERATIONS["translate x"](plain, 0.7)).astype(int)
    assert np.abs(moved[:, :-7] - pixels[:, 7:]).max() <= 1  # 7 of 10 pixels to the left
    assert (moved[:, -6:] == 128).all()
    bright = np.asarray(OPERATIONS["brightness"](plain, -0.7)).astype(int)
    assert np.abs(bright - np.minimum(pixels * (0.7 * 1.8 + 0.1), 255)).max() <= 1  # whichever sign was drawn
    assert OPERATIONS["identity"](plain, 0.7) is plain
    assert len(OPERATIONS) == 10
    for name, operation in OPERATIONS.items():
        assert operation(plain, 0.7).size == plain.size, name


def test_half_of_two_operations_happen_and_each_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}

    def noted(name: str):
        def operation(one: Image.Image, share: float) -> Image.Image:
            assert abs(share) == pytest.approx(0.7)
            seen[name] = seen.get(name, 0) + 1
            return one

        return operation

    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, noted(name))
    rng = np.random.default_rng(3)
    for _ in range(4000):
        RandAugment()(picture(2, 2), rng)
    assert sum(seen.values()) / 4000 == pytest.approx(1.0, abs=0.05)
    assert all(count == pytest.approx(400, abs=80) for count in seen.values())


def test_pixels_are_augmented_only_while_training_and_from_the_generator_alone() -> None:
    published = PixelInput(16, crop_ratio=(0.5, 1.0), augmentation="x-vlm")
    plain = PixelInput(16)
    assert (published([picture()]) == plain([picture()])).all()
    one, two = (published([picture()] * 4, np.random.default_rng(5)) for _ in range(2))
    assert (one == two).all()
    assert (one != published([picture()] * 4, np.random.default_rng(6))).any()
    assert "augmentation" not in describe(plain)  # an input saved before is the same
    assert published.identity() == plain.identity()  # cached outputs fit both
