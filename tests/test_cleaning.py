from __future__ import annotations

import pytest

from diptych.data.text import WordInput
from diptych.data.text_inputs import CleanedInput, clean_caption
from diptych.data.vocabulary import build_vocabulary
from diptych.errors import DataError
from diptych.parts import describe


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("A Dog's day, at-the/beach!", "a dog s day at the beach"),
        ('  <person>  is (very)  happy ~ #1: yes; no*? "so"  ', "person is very happy 1 yes no so"),
        ("already clean", "already clean"),
        (" ".join(map(str, range(80))), " ".join(map(str, range(64)))),
    ],
)
def test_captions_are_cleaned_by_the_published_rule(text: str, clean: str) -> None:
    assert clean_caption(text) == clean


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(DataError, match=r"'\?!'"):
        clean_caption("?!")


def test_queries_are_cleaned_as_training_texts_are() -> None:
    words = WordInput(build_vocabulary(["a red dog"], 1), augment=0.0)
    cleaned = CleanedInput(words)
    assert cleaned(["A RED-dog!"]).values.tolist() == words(["a red dog"]).values.tolist()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("A Dog's day, at-the/beach!", "a dogs day at the beach"),
        ('  <person>  is (very)  happy ~ #1: yes; no*? "so"  ', "person is very happy 1 yes no so"),
        (" ".join(map(str, range(80))), " ".join(map(str, range(30)))),
    ],
)
def test_x_vlm_drops_marks_and_keeps_thirty_words(text: str, clean: str) -> None:
    assert clean_caption(text, "x-vlm") == clean
    words = WordInput(build_vocabulary([clean], 1), augment=0.0)
    assert CleanedInput(words, "x-vlm")([text]).values.tolist() == words([clean]).values.tolist()


def test_an_input_saved_before_cleans_as_cusa_does() -> None:
    described = describe(CleanedInput(WordInput(build_vocabulary(["a"], 1), augment=0.0)))
    assert "form" not in described
