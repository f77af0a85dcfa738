"""Words, vocabularies, tokenizers, Size Augmentation of words, and the text stores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from small import bert_folder
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from diptych.data.arrays import ArrayStore
from diptych.data.augmentation import WordAugmentation
from diptych.data.text import CachedTexts, TextStore, TokenTexts, WordInput, WordPieceInput
from diptych.data.vocabulary import build_vocabulary, published_form, read_vocabulary, tokenize
from diptych.errors import CheckpointError, DataError, SettingsError
from diptych.parts import describe, rebuild

# ---- words

TREEBANK = [  # single sentences, cut as NLTKWordTokenizer of NLTK 3.10 cuts them
    ("A man's dog doesn't bark .", "a man 's dog does n't bark ."),
    ("two dogs, one cat; running!", "two dogs , one cat ; running !"),
    ("the players' bench (red)", "the players ' bench ( red )"),
    ('a sign that says "stop"', "a sign that says `` stop ''"),
    ("it's 10:30, i can't wait...", "it 's 10:30 , i ca n't wait ..."),
    ("cannot we'll they're i've", "can not we 'll they 're i 've"),
    ("a t-shirt for $3,000 & 50%", "a t-shirt for $ 3,000 & 50 %"),
    ('he said: "don\'t go"', "he said : `` do n't go ''"),
    ("mid-air -- wow?", "mid-air -- wow ?"),
    ("gonna wanna gimme", "gon na wan na gim me"),
    ("‘quoted’ “words” –", "‘ quoted ’ “ words ” –"),
    ("rock 'n' roll in the '90s", "rock 'n ' roll in the ' 90s"),
    ("a/b #1 @home *star*", "a/b # 1 @ home * star *"),
    ("o'clock ma'am y'all", "o'clock ma'am y'all"),
    ('She said "go."', "she said `` go . ''"),
    ("ends here.)", "ends here . )"),
    ("", ""),
    ("   ", ""),
]


@pytest.mark.parametrize(("text", "words"), TREEBANK)
def test_words_are_cut_as_nltk_cuts_them(text: str, words: str) -> None:
    assert tokenize(text) == words.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "A dog runs. The cat sleeps.",
            "a dog runs . the cat sleeps .",
        ),  # what Punkt adds to the Treebank rules
        ("Mr. Smith meets Dr. Who at 5 p.m. today.", "mr. smith meets dr. who at 5 p.m. today ."),
        ("the u.s. flag", "the u.s. flag"),
        ("J. Smith wears number 7. he runs.", "j. smith wears number 7. he runs ."),
        ("wait... what", "wait ... what"),
        ("from the u.s.", "from the u.s ."),
    ],
)
def test_periods_inside_a_text(text: str, words: str) -> None:
    assert tokenize(text) == words.split()


ATOMS = """
    dog cat's dogs' don't can't cannot it's we'll they're i've gonna wanna t-shirt 3,000 10:30 a u.s 5 $5 50%
    (red) [x] "hello" "hi there" 'hello' 'hi you' rock'n'roll -- - ... ! ? !! , ; : & mid-air dog’s “yes” hi,
    one,two this:that wait...what dog--cat end) (start "word", o'clock 's * #1 @home c++ a/b <b> — ice–cream
    "big"! y'all 'em '90s cat's, he's) isn't, a: lemme gotta
"""


def test_words_agree_with_nltk_on_made_up_captions() -> None:
    nltk = pytest.importorskip("nltk.tokenize.destructive", reason="compares with NLTK where it is installed")
    reference, rng = nltk.NLTKWordTokenizer(), random.Random(0)
    atoms = ATOMS.split()
    for _ in range(1500):
        text = " ".join(rng.choices(atoms, k=rng.randint(1, 6))) + rng.choice(
            ["", ".", "!", " .", '."', ".)"]
        )
        assert tokenize(text) == reference.tokenize(text), text


# ---- vocabulary


def test_vocabulary_follows_the_published_rules() -> None:
    words = build_vocabulary(["A dog ."] * 4 + ["a cat"] * 3 + ["dog"])
    assert words == ["<pad>", "<start>", "<end>", "<unk>", "a", "dog", ".", "<mask>"]
    assert build_vocabulary(["a cat"], min_count=1)[4:-1] == ["a", "cat"]
    with pytest.raises(SettingsError, match="min_count=0"):
        build_vocabulary([], min_count=0)


def test_published_vocabulary_is_read(tmp_path: Path) -> None:
    words = ["<pad>", "<start>", "<end>", "<unk>", "dog", "b'", "naïve"]
    path = tmp_path / "f30k_precomp_vocab.json"
    path.write_text(json.dumps(published_form(words)), "utf-8")
    assert read_vocabulary(path) == [*words, "<mask>"]
    form = published_form(words)
    assert form["word2idx"]["dog"] == 4
    assert form["idx2word"]["4"] == "dog"
    assert form["idx"] == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"vocab\.json"),
        ('{"idx": 3}', "word2idx"),
        ('{"word2idx": {"<pad>": 0, "<start>": 2}}', r"\b0\b.*\b1\b"),
        ('["dog", "cat"]', "'dog'"),
        ('["<pad>", "<start>", "<end>", "<unk>", "dog", "dog"]', "'dog'"),
    ],
)
def test_wrong_vocabularies(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_vocabulary(path)
    assert "vocab.json" in str(caught.value)
    with pytest.raises(DataError, match="none"):
        read_vocabulary(tmp_path / "none.json")


# ---- WordInput

WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "dog", "runs", "<mask>"]


def test_word_ids_padding_and_mask() -> None:
    features = WordInput(WORDS)(["A dog runs", "zebra", ""])
    assert features.values.tolist() == [[1, 4, 5, 6, 2], [1, 3, 2, 0, 0], [1, 2, 0, 0, 0]]
    assert features.values.dtype == np.int64
    assert features.sizes.tolist() == [5, 3, 2]
    assert features.is_ids


def test_word_store() -> None:
    store = WordInput(WORDS).prepare(["a dog", "runs", "a a a"])
    assert isinstance(store, TextStore)
    assert len(store) == 3
    assert [store.size(i) for i in range(3)] == [4, 3, 5]
    assert store.collate([2, 0]).values.tolist() == [[1, 4, 4, 4, 2], [1, 4, 5, 2, 0]]
    store.pad_to_multiple = 8
    padded = store.collate([1])
    assert padded.values.tolist() == [[1, 6, 2, 0, 0, 0, 0, 0]]
    assert padded.sizes.tolist() == [3]
    assert WordInput(WORDS)([]).values.shape == (0, 0)


def test_word_input_saves_its_vocabulary_in_the_published_form(tmp_path: Path) -> None:
    made = WordInput(WORDS, augment=0.1)
    config = describe(made, tmp_path)
    assert config["words"] == {"asset": "vocabulary.json"}
    assert json.loads((tmp_path / "vocabulary.json").read_text())["word2idx"]["dog"] == 5
    again = rebuild(json.loads(json.dumps(config)), tmp_path)
    assert again.words == WORDS
    assert again.augment == 0.1
    assert again.vocabulary_size == 8
    assert describe(again) == describe(made)  # a fingerprint does not tell them apart
    assert describe(WordInput([*WORDS[:-1], "cat", "<mask>"], 0.1)) != describe(made)


def test_word_input_errors() -> None:
    with pytest.raises(SettingsError, match=r"\b0\b"):
        WordInput(WORDS[:-1])
    assert WordInput(WORDS[:-1], augment=0.0)(["a dog"]).values.tolist() == [[1, 4, 5, 2]]
    with pytest.raises(SettingsError, match=r"augment=1\.0"):
        WordInput(WORDS, augment=1.0)


# ---- augmentation


class Draws:
    """Stands in for a generator: given uniform draws, and replacements counted up from 900."""

    def __init__(self, uniform: list[float]) -> None:
        self.uniform = uniform

    def random(self, count: int) -> np.ndarray:
        assert count == len(self.uniform)
        return np.array(self.uniform)

    def choice(self, _: Any, count: int) -> np.ndarray:
        return np.arange(900, 900 + count)


def oracle(texts: list[list[tuple[int, int]]], draws: list[float], p: float, mask: int) -> list[list[int]]:
    """Word by word: u < p → u/p below .5 masks each piece, below .6 replaces each, else deletes."""
    drawn, fresh, out = iter(draws), iter(range(900, 2000)), []
    for text in texts:
        kept: list[int] = []
        groups: list[tuple[int, list[int]]] = []
        for piece, word in text:
            if groups and groups[-1][0] == word:
                groups[-1][1].append(piece)
            else:
                groups.append((word, [piece]))
        for word, pieces in groups:
            u = next(drawn)
            if word < 0 or u >= p:
                kept += pieces
            elif u / p < 0.5:
                kept += [mask] * len(pieces)
            elif u / p < 0.6:
                kept += [next(fresh) for _ in pieces]
        out.append(kept or [text[0][0]])
    return out


def flat(texts: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.array([piece for text in texts for piece, _ in text])
    words = np.array([word for text in texts for _, word in text])
    return ids, words, np.repeat(np.arange(len(texts)), [len(text) for text in texts])


def made_up_texts(rng: random.Random, specials: bool) -> list[list[tuple[int, int]]]:
    texts = []
    for _ in range(rng.randint(1, 6)):
        text = [
            (rng.randint(10, 99), word) for word in range(rng.randint(1, 5)) for _ in range(rng.randint(1, 3))
        ]
        texts.append([(1, -1), *text, (2, -1)] if specials else text)
    return texts


def groups_in(texts: list[list[tuple[int, int]]]) -> int:
    return sum(1 for text in texts for i, (_, word) in enumerate(text) if i == 0 or text[i - 1][1] != word)


@pytest.mark.parametrize("specials", [True, False])
def test_augmentation_is_the_published_one(specials: bool) -> None:
    rng = random.Random(1)
    for _ in range(300):
        texts = made_up_texts(rng, specials)
        p = rng.choice([0.2, 0.5, 0.99])
        draws = [rng.random() for _ in range(groups_in(texts))]
        ids, rows = WordAugmentation(p, 7, np.arange(10))(*flat(texts), Draws(draws))  # type: ignore[arg-type]
        got = [ids[rows == row].tolist() for row in range(len(texts))]
        assert got == oracle(texts, draws, p, 7)


def test_the_oracle_notices_a_wrong_share() -> None:
    texts = [[(10, 0), (11, 1)]]
    draws = [0.105, 0.9]  # 0.105 / 0.2 = 0.525: replaced, were it not for the wrong share
    wrong = WordAugmentation(0.2, 7, np.arange(10), masked=0.6, replaced=0.0)
    ids, _ = wrong(*flat(texts), Draws(draws))  # type: ignore[arg-type]
    assert oracle(texts, draws, 0.2, 7) == [[900, 11]]
    assert ids.tolist() == [7, 11]


def test_augmentation_rates() -> None:
    count = 200_000
    ids, words = np.full(count, 5), np.arange(count)
    rows = np.repeat(np.arange(count // 10), 10)
    new, _ = WordAugmentation(0.2, 1, np.array([2, 3]))(ids, words, rows, np.random.default_rng(0))
    deleted, masked = 1 - len(new) / count, float((new == 1).sum()) / count
    replaced = {value: float((new == value).sum()) / count for value in (2, 3)}
    assert deleted == pytest.approx(0.08, abs=0.003)
    assert masked == pytest.approx(0.10, abs=0.003)
    assert replaced[2] + replaced[3] == pytest.approx(0.02, abs=0.002)
    assert replaced[2] == pytest.approx(replaced[3], abs=0.002)


def test_word_input_augments_specials_and_never_empties() -> None:
    texts = [""] * 400 + ["a dog runs"] * 400
    store = WordInput(WORDS, augment=0.9).prepare(texts)
    features = store.collate(range(800), np.random.default_rng(0))
    assert int(features.sizes.min()) == 1
    starts = features.values[:, 0]
    assert int((starts == 1).sum()) < 500  # <start> itself is masked, replaced or deleted
    assert np.array_equal(store.collate([3, 799]).values, store.collate([3, 799], None).values)
    a, b = (store.collate(range(9), np.random.default_rng(4)).values for _ in range(2))
    assert np.array_equal(a, b)
    plain = WordInput(WORDS, augment=0.0).prepare(texts)
    assert np.array_equal(plain.collate([500], np.random.default_rng(0)).values, plain.collate([500]).values)


# ---- WordPieceInput


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "a",
        "dog",
        "run",
        "##s",
        "##ning",
        "'",
        "un",
        "##known",
    ]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)  # a stale setting of the file, which must not cut our texts
    tokenizer.enable_padding(length=9)
    folder = tmp_path_factory.mktemp("wordpiece")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "length"), [("Bert", 64), ("Roberta", 61), (None, 2**31)])
def test_texts_are_cut_at_the_positions_of_a_model_whose_tokenizer_states_none(
    kind: str | None, length: int, tmp_path: Path
) -> None:
    """An hour of training must not end at the first long text."""
    folder = bert_folder(tmp_path / "bert")
    (folder / "config.json").unlink()
    if kind is not None:
        config = getattr(transformers, f"{kind}Config")(max_position_embeddings=64, pad_token_id=2)
        config.save_pretrained(folder)
    made = WordPieceInput(folder)
    assert made.max_length == length
    assert made.read(["dog " * 90]).size(0) == min(92, length)
    made.save_assets(tmp_path)  # where the model's configuration lies in another folder
    assert WordPieceInput(tmp_path / "tokenizer").max_length == length


def test_wordpiece_ids_and_words(wordpiece: Path) -> None:
    made = WordPieceInput(str(wordpiece))
    store = made.prepare(["A dog runs", "running dog's unknown", ""])
    assert [store.size(i) for i in range(3)] == [6, 9, 2]
    features = store.collate([0, 1, 2])
    assert features.values[0].tolist() == [2, 5, 6, 7, 8, 3, 0, 0, 0]
    assert features.values[1].tolist() == [2, 7, 9, 6, 10, 1, 11, 12, 3]
    assert features.mask.sum(1).tolist() == [6, 9, 2]
    assert isinstance(store, TokenTexts)
    assert store.words[:6].tolist() == [-1, 0, 1, 2, 2, -1]
    assert made.vocabulary_size == 13


def test_wordpiece_augmentation_takes_whole_words_and_leaves_specials(wordpiece: Path) -> None:
    store = WordPieceInput(wordpiece, augment=0.8).prepare(["unknown"] * 500)
    features = store.collate(range(500), np.random.default_rng(0))
    assert bool((features.values[:, 0] == 2).all())
    last = np.take_along_axis(features.values, (features.sizes - 1)[:, None], axis=1)
    assert bool((last == 3).all())
    seen = {tuple(row[:size].tolist()) for row, size in zip(features.values, features.sizes, strict=True)}
    assert {(2, 11, 12, 3), (2, 4, 4, 3), (2, 3)} <= seen
    assert (2, 4, 12, 3) not in seen  # never one piece of a word alone
    assert (2, 12, 3) not in seen
    assert len(seen) > 10  # random vocabulary entries, drawn for each piece


def test_wordpiece_lengths(wordpiece: Path) -> None:
    long = "dog " * 100
    assert WordPieceInput(wordpiece).prepare([long]).size(0) == 64
    store = WordPieceInput(wordpiece, max_length=5).prepare([long, "a"])
    assert store.collate([0, 1]).values.tolist() == [[2, 6, 6, 6, 3], [2, 5, 3, 0, 0]]
    for wrong in (2, 65):
        with pytest.raises(SettingsError, match=f"max_length={wrong}"):
            WordPieceInput(wordpiece, max_length=wrong)


def test_wordpiece_chunks_join(wordpiece: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{'dog ' * (i % 5)}runs" for i in range(23)]
    whole = WordPieceInput(wordpiece).prepare(texts)
    monkeypatch.setattr("diptych.data.text.CHUNK", 4)
    parts = WordPieceInput(wordpiece).prepare(texts)
    for name in ("ids", "words", "offsets"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_a_saved_tokenizer_needs_its_source_no_longer(wordpiece: Path, tmp_path: Path) -> None:
    made = WordPieceInput(str(wordpiece), augment=0.3, max_length=20)
    before = describe(made)
    made(["a dog"])  # using a tokenizer leaves traces in its state, which must not reach a fingerprint
    assert describe(made) == before
    config = describe(made, tmp_path)
    assert config == {
        "part": "WordPieceInput",
        "source": {"asset": "tokenizer"},
        "augment": 0.3,
        "max_length": 20,
    }
    again = rebuild(json.loads(json.dumps(config)), tmp_path)
    assert np.array_equal(again(["a dog runs"]).values, made(["a dog runs"]).values)
    assert describe(again) == before
    with pytest.raises(CheckpointError, match="elsewhere/tokenizer"):
        rebuild(config, tmp_path / "elsewhere")


def test_byte_level_tokenizer_without_mask(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=r"\b0\b"):
        WordPieceInput(tmp_path)
    store = WordPieceInput(tmp_path, augment=0.0).prepare(["ab cd"])
    assert store.words.tolist() == [-1, 0, 0, 1, 1, 1, -1]
    assert store.pad_id == 0


def test_tokenizers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="none"):
        WordPieceInput(tmp_path / "none")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        WordPieceInput(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing.*HF_HUB_OFFLINE"):
        WordPieceInput("nobody/nothing")


# ---- cached states


@pytest.mark.parametrize("on_disk", [True, False])
def test_cached_states(on_disk: bool, tmp_path: Path) -> None:
    states = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float16)
    offsets = np.array([0, 3, 4, 10])
    path = tmp_path / "states.npy"
    np.save(path, states)
    store = CachedTexts(ArrayStore(path) if on_disk else states, offsets)
    assert isinstance(store, TextStore)
    assert [store.size(i) for i in range(len(store))] == [3, 1, 6]
    features = store.collate([2, 0], np.random.default_rng(0))
    assert features.values.dtype == np.float32
    assert features.values.shape == (2, 6, 4)
    assert features.sizes.tolist() == [6, 3]
    assert np.array_equal(features.values[0], states[4:].astype(np.float32))
    assert np.array_equal(features.values[1, :3], states[:3].astype(np.float32))
    assert float(np.abs(features.values[1, 3:]).max()) == 0.0
    assert CachedTexts(states, offsets, pad_to_multiple=4).collate([1]).values.shape == (1, 4, 4)


@pytest.mark.parametrize("offsets", [[0, 3, 9], [0, 3, 3, 10], [1, 10], []])
def test_cached_states_with_wrong_offsets(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="offsets"):
        CachedTexts(np.zeros((10, 4), dtype=np.float32), np.array(offsets))
    with pytest.raises(DataError, match="shape"):
        CachedTexts(np.zeros(10, dtype=np.float32), np.array([0, 10]))
