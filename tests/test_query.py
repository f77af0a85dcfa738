"""Query expressions: terms, weights, signs, files, and where their mistakes are."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from diptych.errors import QueryError
from diptych.index.protocol import Term
from diptych.index.query.parse import MAX_LENGTH, parse_query


@pytest.fixture
def shoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 4)).save("shoe.jpg")
    Image.new("RGB", (4, 4)).save("my shoe.png")
    return tmp_path / "shoe.jpg"


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("red shoe", [Term("red shoe")]),
        ("  a t-shirt, 50+ sizes  ", [Term("a t-shirt, 50+ sizes")]),
        ("3:10 to Yuma", [Term("3:10 to Yuma")]),
        ("a dog's 12\" bowl", [Term("a dog's 12\" bowl")]),
        ('"red shoe"', [Term("red shoe")]),
        ('"2:red shoe" - "sneaker"', [Term("red shoe", weight=2.0), Term("sneaker", weight=-1.0)]),
        ('2:"red shoe" -"sneaker"', [Term("red shoe", weight=2.0), Term("sneaker", weight=-1.0)]),
        (
            "red shoe - sneaker + 0.5:lace",
            [Term("red shoe"), Term("sneaker", weight=-1), Term("lace", weight=0.5)],
        ),
        ('"1:3:10 to Yuma"', [Term("3:10 to Yuma")]),
        ('"say \\"hi\\"" + "b"', [Term('say "hi"'), Term("b")]),
        ('- "b" + "a"', [Term("b", weight=-1.0), Term("a")]),
        ('"a"+"b"', [Term("a"), Term("b")]),
        ("шорты - 赤い", [Term("шорты"), Term("赤い", weight=-1.0)]),
    ],
)
def test_texts(text: str, terms: list[Term]) -> None:
    assert list(parse_query(text).terms) == terms


def test_files(shoe: Path) -> None:
    assert parse_query("./shoe.jpg").terms == (Term(Path("./shoe.jpg"), "image"),)
    assert parse_query("shoe.jpg").terms == (Term(Path("shoe.jpg"), "image"),)
    assert parse_query(str(shoe)).terms == (Term(shoe, "image"),)
    query = parse_query('"2:red shoe" - "sneaker" + ./shoe.jpg')
    assert query.terms[2] == Term(Path("./shoe.jpg"), "image")
    assert query.text == "red shoe"
    assert parse_query('0.3:"./my shoe.png" + x').terms[0] == Term(Path("./my shoe.png"), "image", 0.3)
    assert parse_query('"other.jpg"').terms == (Term("other.jpg"),)
    assert parse_query("other.jpg", paths=False).terms == (Term("other.jpg"),)
    assert parse_query("shoes in a .jpg file").terms == (Term("shoes in a .jpg file"),)
    assert parse_query("./shoe.jpg", paths=False).terms == (Term("./shoe.jpg"),)


def test_addresses() -> None:
    assert parse_query("https://a.b/c.jpg").terms == (Term("https://a.b/c.jpg", "url"),)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "empty"),
        ("   ", 0, "empty"),
        ('"red', 0, "quote at character 1"),
        ('"red" + "blue', 8, "quote at character 9"),
        ('"red" "blue"', 6, "without + or - between them at character 7"),
        ('"red" blue', 6, "character 7"),
        ('"red" + - "blue"', 8, "after '+' at character 9"),
        ('"red" +', 6, "ends after '+' at character 7"),
        ('"0:red" + "blue"', 0, "the weight 0 at character 1"),
        ('"2:" + "blue"', 0, "empty term at character 1"),
        ('"" + "blue"', 0, "empty term"),
        ("red + \udcff", 6, "text at character 7 of the query is not valid Unicode"),
        ("nothing.jpg", 0, "no file nothing.jpg (character 1 of the query): check the path"),
        ("red - my nothing.PNG", 6, "no file my nothing.PNG"),
        ("red + ./nothing.jpg", 6, "no file ./nothing.jpg (character 7"),
    ],
)
def test_a_mistake_is_located(text: str, position: int, words: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse_query(text)
    assert words in str(caught.value)
    assert caught.value.position == position


def test_quotes_as_phones_write_them() -> None:
    straight = parse_query('"2:red shoe" - "sneaker"').terms
    assert (
        parse_query("“2:red shoe” - “sneaker”").terms
        == parse_query(" „2:red shoe“ - „sneaker“").terms
        == straight
    )
    assert parse_query("a sign, “stop”").terms == (Term("a sign, “stop”"),)


def test_what_is_not_wanted_may_stand_alone_beside_an_image() -> None:
    assert parse_query('- "red"').terms == (Term("red", weight=-1.0),)


def test_limits() -> None:
    with pytest.raises(QueryError, match=str(MAX_LENGTH)):
        parse_query("a" * (MAX_LENGTH + 1))
    with pytest.raises(QueryError, match=r"\b32\b"):
        parse_query(" + ".join(["a"] * 40))
    assert parse_query("/" + "a" * 9000, paths=False).terms[0].kind == "text"
    with pytest.raises(QueryError, match=r"\b1\b"):
        parse_query("/" + "a" * 9000)


@pytest.mark.parametrize(
    "text",
    [
        '1"' * 5_000,
        "1" * 9_000 + '"',
        '1:"' * 3_000,
        " " * 9_000 + '"',
        'a"' * 5_000,
        "+-" * 5_000,
        "\\" * 9_999,
        '" ' * 5_000,
    ],
)
def test_a_query_is_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    with suppress(QueryError):
        parse_query(text, paths=False)
    assert time.process_time() - start < 0.5
