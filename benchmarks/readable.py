"""How often a query is told to be unreadable: English captions, words, names and typos, and what is none of these.

    python benchmarks/readable.py [--captions DATA] [--split val]

The sentences in ``languages/`` were written for this table; they took no part in learning the scores or in choosing the
thresholds. ``--captions`` measures those of a data set instead of ``languages/english.txt``.

    python benchmarks/readable.py --train src/diptych/index/query/english.npz

learns the scores again. It needs ``pip install scikit-learn faker django wordfreq emoji``: English words drawn by their
frequency (wordfreq), names of people (Faker) and English phrases (names of emoji, strings of Django) against words and
phrases of 25 languages and random letters. A fifth of each list is held out; its English lists choose the thresholds,
which 1 in 100 of the worst list passes.
"""

from __future__ import annotations

import argparse
import re
import string
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.index.query.readable import (
    BUCKETS,
    RUNS_OF_LETTERS,
    english,
    language_features,
    letter_features,
    words_of,
)

FOLDER = Path(__file__).parent / "languages"
EMOJI = ("de", "es", "fr", "id", "it", "pt", "tr")
LANGUAGES = (
    "ca", "cs", "da", "de", "es", "et", "eu", "fi", "fr", "gl", "hr", "hu", "id",
    "it", "lt", "lv", "nb", "nl", "pl", "pt", "ro", "sk", "sl", "sv", "tr",
)  # fmt: skip
OFTEN = {"de": 3, "es": 3, "fr": 3, "it": 2, "nl": 2, "pt": 2}  # languages that more people write
PEOPLE = (
    "cs_CZ", "da_DK", "de_DE", "en_US", "en_GB", "en_IN", "es_ES", "es_MX", "et_EE", "fi_FI",
    "fr_FR", "ga_IE", "hr_HR", "hu_HU", "id_ID", "is_IS", "it_IT", "lt_LT", "nl_NL", "no_NO",
    "pl_PL", "pt_BR", "ro_RO", "sk_SK", "sl_SI", "sv_SE", "tr_TR", "zu_ZA", "yo_NG", "ha_NG",
)  # fmt: skip
MIXED, BAGS, FULL_NAMES, RANDOM = 30_000, 2_000, 1_000, 12_000  # made phrases of each sort
ITERATIONS = 150
JOINED = (("a", "and a"), ("the", "in the"), ("two", "with"), ("a", "on a"), ("", "of"), ("an", "near the"))
LEVELS = 15  # of a weight, on either side of 0: few, so that the file stays small
LEAST = 300  # texts of a list that may choose a threshold
WORDS, USUAL = 100_000, 30_000  # English words, and those of them whose typos choose a threshold
Lists = dict[str, list[str]]
Draw = np.random.Generator


def typo(text: str, rng: Draw) -> str:
    """The text with one letter left out, added, replaced, or swapped with the next."""
    place, letter = int(rng.integers(len(text))), string.ascii_lowercase[rng.integers(26)]
    before, here, after = text[:place], text[place], text[place + 1 :]
    return (before + after, before + letter + here + after, before + letter + after,
            before + after[:1] + here + after[1:])[rng.integers(4)]  # fmt: skip


def letters(rng: Draw, least: int = 5, most: int = 12) -> str:
    """A word of random letters."""
    return "".join(
        string.ascii_lowercase[one] for one in rng.integers(26, size=rng.integers(least, most + 1))
    )


def measured(captions: Sequence[str]) -> dict[str, tuple[list[str], bool]]:
    """The lists of the table, and whether a warning is right."""
    rng = np.random.default_rng(2)
    words = sorted({word for text in captions for word in words_of(text) if len(word) > 2})
    read = {
        name: (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
        for name in ("german", "french", "spanish")
    }
    return {
        "captions": (list(captions), False),
        "words of captions": (words, False),
        "names of people and places": ((FOLDER / "names.txt").read_text("utf-8").splitlines(), False),
        "captions with one typo": ([typo(text, rng) for text in captions], False),
        "words with one typo": ([typo(word, rng) for word in words if len(word) > 3], False),
        **{f"{name.title()} captions": (texts, True) for name, texts in read.items()},
        "one word of 5 to 16 random letters": ([letters(rng, 5, 16) for _ in range(2000)], True),
        "one word of 8 to 16 random letters": ([letters(rng, 8, 16) for _ in range(2000)], True),
    }


def table(captions: Sequence[str]) -> list[tuple[str, int, float, bool]]:
    """For each list its name, its size, the share that is told, and whether that is right."""
    known = english()
    return [
        (name, len(texts), float(np.mean([not known.reads(text) for text in texts])), right)
        for name, (texts, right) in measured(captions).items()
    ]


def held(text: str) -> bool:
    """One text in five."""
    return zlib.crc32(b"held" + text.encode()) % 5 == 0


def frequent(language: str, most: int) -> tuple[list[str], Any]:
    """The most frequent words of a language, those without digits and marks, and their frequencies."""
    from wordfreq import available_languages, get_frequency_dict

    if language not in available_languages():
        return [], np.zeros(0)
    found = {w: f for w, f in get_frequency_dict(language, "best").items() if words_of(w) == [w]}
    words = sorted(found, key=lambda word: (-found[word], word))[:most]
    return words, np.array([found[word] for word in words])


def bags(language: str, number: int, lengths: tuple[int, int], power: float, rng: Draw) -> list[str]:
    """Words drawn by a power of their frequency: below 1, rare ones come more often."""
    words, often = frequent(language, USUAL)
    if not words:
        return []
    often = often**power
    sizes = rng.integers(*lengths, size=number)
    drawn = rng.choice(len(words), size=sizes.sum(), p=often / often.sum())
    return [" ".join(words[n] for n in one) for one in np.split(drawn, np.cumsum(sizes)[:-1])]


def english_lists(rng: Draw) -> Lists:
    """What a model for English reads: words, names of people, phrases."""
    import importlib

    people = []
    for locale in PEOPLE:
        names = importlib.import_module(f"faker.providers.person.{locale}").Provider
        kinds = ("first_names", "first_names_male", "first_names_female")
        first = [name for kind in kinds for name in getattr(names, kind, ())]
        last = list(getattr(names, "last_names", ()))
        for _ in range(FULL_NAMES if first and last else 0):
            people.append(f"{first[rng.integers(len(first))]} {last[rng.integers(len(last))]}".lower())
    emoji = emoji_names("en")
    joined = rng.integers(len(JOINED), size=(MIXED, 2))
    pairs = rng.integers(len(emoji), size=(MIXED, 2))
    return {
        "words": [word for word in frequent("en", WORDS)[0] if word.isascii()],
        "people": people,
        "emoji": emoji,
        "scenes": [
            f"{JOINED[a][0]} {emoji[one]} {JOINED[b][1]} {emoji[two]}".strip()
            for (a, b), (one, two) in zip(joined, pairs, strict=True)
        ],
        "phrases": django_strings("de", source=True),
        "usual": bags("en", MIXED, (3, 16), 0.8, rng),
        "rare": bags("en", MIXED, (2, 6), 0.5, rng),
    }


def emoji_names(language: str) -> list[str]:
    """Names of emoji in a language, without skin tones and flags."""
    import emoji

    emoji.config.load_language()
    tones, flags = re.compile("[\U0001f3fb-\U0001f3ff]"), re.compile("^[\U0001f1e6-\U0001f1ff]")
    entries = [
        v
        for e, v in emoji.EMOJI_DATA.items()
        if v["status"] == 2 and not tones.search(e) and not flags.search(e)
    ]
    return list(
        dict.fromkeys(entry[language].strip(":").replace("_", " ").replace("-", " ") for entry in entries)
    )


def django_strings(language: str, source: bool = False) -> list[str]:
    """Translated strings of Django, or what they translate."""
    import gettext

    import django

    found = set()
    for place in sorted(Path(django.__file__).parent.rglob(f"locale/{language}/LC_MESSAGES/django.mo")):
        with place.open("rb") as file:
            pairs: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, value in pairs.items():
            original = key[0] if isinstance(key, tuple) else key
            if original and value != original:
                found.add(
                    " ".join(
                        words_of(
                            re.sub(
                                r"%\(?\w*\)?\w|<[^>]+>|\{[^}]*\}|https?\S+",
                                " ",
                                original if source else value,
                            )
                        )
                    )
                )
    return sorted(text for text in found if len(text.split()) >= 3)


def other_lists(rng: Draw) -> Lists:
    """What it does not read: phrases of other languages, words of theirs by frequency, random letters."""
    lists = {f"emoji {one}": [t for t in emoji_names(one) if " " in t] for one in EMOJI}
    for language in LANGUAGES:
        whole = django_strings(language)
        parts = [
            " ".join(t.split()[start : start + 5])
            for t in whole
            for start in [rng.integers(max(1, len(t.split()) - 4))]
        ]
        number = BAGS * OFTEN.get(language, 1)
        lists[f"phrases {language}"] = [*whole, *parts]
        lists[f"usual {language}"] = bags(language, number, (3, 9), 0.8, rng)
        lists[f"rare {language}"] = bags(language, number, (3, 6), 0.6, rng)
    lists["letters"] = [" ".join(letters(rng) for _ in range(rng.integers(1, 4))) for _ in range(RANDOM)]
    return lists


def matrix(texts: Sequence[str], features: Callable[[str], Any], width: int) -> Any:
    """Counts (texts, width) of the features of texts."""
    from scipy.sparse import csr_matrix

    rows = [features(text) for text in texts]
    ends = np.cumsum([0, *map(len, rows)])
    return csr_matrix((np.ones(ends[-1], np.float32), np.concatenate(rows), ends), shape=(len(texts), width))


def with_typos(texts: Sequence[str], rng: Draw, every: int = 4) -> list[str]:
    """The texts, and some of them with a typo."""
    return [*texts, *(typo(text, rng) for text in texts[::every] if len(text) > 3)]


def learn(
    english: Sequence[str], others: Sequence[str], features: Callable[[str], Any], width: int
) -> dict[str, Any]:
    """Weights of features that are higher for the others, in whole numbers of a scale."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=ITERATIONS, class_weight="balanced")
    truth = np.r_[np.zeros(len(english)), np.ones(len(others))]
    model.fit(matrix([*english, *others], features, width), truth)
    scale = np.quantile(np.abs(model.coef_), 0.9995) / LEVELS  # few are larger, and are cut
    weights = np.clip(np.round(model.coef_[0] / scale), -LEVELS, LEVELS).astype(np.int8)
    return {"weights": weights, "scale": np.float32(scale), "bias": np.float32(model.intercept_[0])}


def train(place: Path) -> None:
    """Learn both scores and their thresholds, and write them."""
    rng = np.random.default_rng(0)
    lists, others = english_lists(rng), other_lists(rng)
    seen = {name: [text for text in texts if not held(text)] for name, texts in lists.items()}
    phrases = [
        *seen["people"],
        *3 * (seen["emoji"] + seen["phrases"]),
        *seen["usual"],
        *seen["rare"],
        *seen["scenes"],
    ]
    unreadable = [text for texts in others.values() for text in texts if not held(text)]
    readable = [*with_typos(seen["words"], rng), *with_typos(phrases, rng, 1)]
    language = learn(readable, unreadable, language_features, BUCKETS)
    names = sorted({word for text in seen["people"] for word in text.split()})
    usual = [word for word in seen["words"][:USUAL] if len(word) > 3]
    random = [letters(rng, 4, 16) for _ in range(5 * RANDOM)]
    spelled = [*with_typos([*seen["words"], *names], rng, 2), *(typo(word, rng) for word in usual)]
    spelling = learn(spelled, random, letter_features, RUNS_OF_LETTERS)
    learned = {f"language_{name}": value for name, value in language.items()}
    learned |= {f"letters_{name}": value for name, value in spelling.items()}
    learned["thresholds"] = np.full(2, np.inf, np.float32)
    learned["thresholds"] = thresholds(learned, lists, rng)
    np.savez_compressed(place, **learned)


def thresholds(learned: dict[str, Any], lists: Lists, rng: Draw) -> Any:
    """Of each score, what all but 1 in 100 of every held-out English list stay below."""
    from diptych.index.query.readable import English

    known = English(learned)
    frequent = set(lists["words"][:USUAL])
    kept = {name: [text for text in texts if held(text)] for name, texts in lists.items()}
    kept["words"] = [word for word in kept["words"] if word in frequent]
    kept |= {
        f"{name}, typos": [typo(text, rng) for text in texts if len(text) > 3]
        for name, texts in kept.items()
        if name != "people"  # names have none: nobody could tell
    }
    scores = [
        np.array([known.scores(text) for text in texts]) for texts in kept.values() if len(texts) >= LEAST
    ]
    return np.max([np.quantile(found, 0.99, axis=0) for found in scores], axis=0).astype(np.float32)


def texts_of(data: str, split: str | None) -> Iterable[str]:
    """The captions of a data set."""
    from diptych.data.formats import open_captions

    return open_captions(data, split=split).texts if split else open_captions(data).texts


def main() -> None:
    """Print the table, or learn the scores again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captions", help="a data set whose captions are measured")
    parser.add_argument("--split")
    parser.add_argument(
        "--train", type=Path, metavar="FILE", help="learn the scores and write them to this file"
    )
    options = parser.parse_args()
    if options.train:
        train(options.train)
    own = (FOLDER / "english.txt").read_text("utf-8").splitlines()
    captions = texts_of(options.captions, options.split) if options.captions else own
    print("| texts | number | warned |\n|---|---|---|")
    for name, number, share, _ in table(list(captions)):
        print(f"| {name} | {number:,} | {100 * share:.1f} % |")


if __name__ == "__main__":
    main()
