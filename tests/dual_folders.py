"""Small CLIP, SigLIP and SigLIP 2 models with random weights, saved in the real format with tokenizer and processor."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from small import WORDS, texts

from diptych.encoders.pretrained import quiet

SIDE, PATCH = 32, 8
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**TINY, "image_size": SIDE, "patch_size": PATCH}


def clip_folder(folder: Path, *, seed: int = 0) -> Path:
    """CLIP: byte-level BPE with merges, short side 32, centre crop."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    pieces = [*characters, *(f"{c}</w>" for c in characters)]
    merges: list[tuple[str, str]] = [("d", "o"), ("do", "g</w>"), ("c", "a"), ("ca", "t</w>")]
    pieces += ["".join(pair) for pair in merges] + ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=20)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**TINY, **ends, "vocab_size": len(pieces), "max_position_embeddings": 20}
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(vision_config=VISION, text_config=text, projection_dim=12))
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return _save(folder, _lively(model), tokenizer, processor)


def siglip_folder(folder: Path) -> Path:
    """SigLIP: sentencepiece, which drops case and punctuation; padding to 16 tokens is attended to."""
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel, SiglipTokenizer

    spiece = _sentencepiece(folder)
    tokenizer = SiglipTokenizer(str(spiece), model_max_length=16, model_input_names=["input_ids"])
    text = {**TINY, "vocab_size": len(tokenizer), "max_position_embeddings": 16, "projection_size": 16}
    torch.manual_seed(1)
    model = SiglipModel(SiglipConfig(vision_config=VISION, text_config=text))
    processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return _save(folder, _lively(model), tokenizer, processor)


def siglip2_folder(folder: Path) -> Path:
    """SigLIP 2 with NaFlex pictures: at most 20 patches of 8 pixels, aspect ratio kept."""
    from transformers import Siglip2Config, Siglip2ImageProcessorPil, Siglip2Model, Siglip2Tokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.ascii_lowercase, *string.digits]
    tokenizer = Siglip2Tokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        model_input_names=["input_ids"],
        padding_side="right",
    )
    vision = {**TINY, "num_patches": 16, "patch_size": PATCH}
    text = {**TINY, "vocab_size": len(pieces), "max_position_embeddings": 24, "projection_size": 16}
    torch.manual_seed(2)
    model = Siglip2Model(Siglip2Config(vision_config=vision, text_config=text))
    processor = Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=20)
    return _save(folder, _lively(model), tokenizer, processor)


def one_size_siglip2_folder(folder: Path) -> Path:
    """SigLIP 2 of one picture size: SigLIP's network; its files name Gemma's tokenizer, which keeps the case."""
    from transformers import Siglip2Tokenizer

    siglip_folder(folder)
    pieces = [
        "<pad>",
        "<eos>",
        "<unk>",
        "<bos>",
        "<mask>",
        "▁",
        *string.ascii_lowercase,
    ]  # as many as SigLIP's
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Siglip2Tokenizer(vocab=vocabulary, model_input_names=["input_ids"], padding_side="right")
    tokenizer.save_pretrained(folder)
    (folder / "spiece.model").unlink()
    for file, changes in (
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}),
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer"}),
    ):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **changes}))
    return folder


def vit_folder(folder: Path) -> Path:
    """A ViT with a class token, as the image side of a fusion encoder."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(3)
    with quiet():
        ViTModel(ViTConfig(**VISION), add_pooling_layer=False).save_pretrained(folder)
    numbers = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    return folder


FOLDERS = {"clip": clip_folder, "siglip": siglip_folder, "siglip2": siglip2_folder}


def _lively(model: Any) -> Any:
    """Weights large enough that a wrong token, mask or pixel shows in the output."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "logit" not in name:
            torch.nn.init.normal_(
                parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.1
            )
    return model


def _save(folder: Path, model: Any, tokenizer: Any, processor: Any) -> Path:
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _sentencepiece(folder: Path) -> Path:
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts(60), *WORDS]),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    return folder / "spiece.model"
