"""Checkpoints of the public SGRAF and CUSA code, in the layout that it saves: the scores of its own computation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import diptych, refused
from dual_folders import clip_folder
from PIL import Image
from sgraf_oracles import score_matrix, sgr_score, similarity_vectors
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from diptych.data.vocabulary import published_form
from diptych.errors import CheckpointError, SettingsError
from diptych.model.retriever import Retriever
from diptych.runs.published import import_cusa, import_sgraf
from diptych.types import as_inputs

DIM, WIDTH, WORD_DIM, REGIONS, NODES = 8, 12, 6, 4, 5
WORDS = ["<pad>", "<start>", "<end>", "<unk>", "a", "red", "green", "dog", "cat"]
TEXTS = ["a red dog", "cat", "a green unknown cat"]
State = dict[str, Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{end}": (size,) for end in ("weight", "bias", "running_mean")}


def sgraf_states(kind: str) -> list[State]:
    """Image encoder, text encoder, similarity encoder, by the names of the public code."""
    gru: dict[str, tuple[int, ...]] = {"embed.weight": (len(WORDS), WORD_DIM)}
    for end in ("", "_reverse"):
        gru |= {
            f"cap_rnn.weight_ih_l0{end}": (3 * DIM, WORD_DIM),
            f"cap_rnn.weight_hh_l0{end}": (3 * DIM, DIM),
        }
        gru |= {f"cap_rnn.bias_{way}_l0{end}": (3 * DIM,) for way in ("ih", "hh")}
    scorer: dict[str, tuple[int, ...]] = {}
    for side in ("v", "t"):
        for part in ("local", "global"):
            scorer |= linear(f"{side}_global_w.embedding_{part}.0", DIM, DIM)
        scorer |= linear(f"{side}_global_w.embedding_common.0", 1, DIM)
    scorer |= norm("v_global_w.embedding_local.1", REGIONS) | norm("v_global_w.embedding_global.1", DIM)
    scorer |= linear("sim_tranloc_w", NODES, DIM) | linear("sim_tranglo_w", NODES, DIM)
    scorer |= linear("sim_eval_w", 1, NODES)
    if kind == "sgr":
        for step in range(3):
            for name in ("graph_query_w", "graph_key_w", "sim_graph_w"):
                scorer |= linear(f"SGR_module.{step}.{name}", NODES, NODES)
    else:
        scorer |= linear("SAF_module.attn_sim_w", 1, NODES) | norm("SAF_module.bn", 1)
    states = [drawn(shapes, seed) for seed, shapes in enumerate((linear("fc", DIM, WIDTH), gru, scorer))]
    for name in [name for name in states[2] if name.endswith("running_mean")]:
        states[2][name.replace("mean", "var")] = torch.rand(len(states[2][name])) + 0.5
        states[2][name.replace("running_mean", "num_batches_tracked")] = torch.tensor(7)
    if kind == "sgr":  # one bias of the keys in all steps, as the loop takes it
        for step in (1, 2):
            states[2][f"SGR_module.{step}.graph_key_w.bias"] = states[2][
                "SGR_module.0.graph_key_w.bias"
            ].clone()
    return states


def unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def normed(s: State, name: str, x: Tensor) -> Tensor:
    """BatchNorm while evaluating; channels come first."""
    scale = s[f"{name}.weight"] / (s[f"{name}.running_var"] + 1e-5).sqrt()
    return (x - s[f"{name}.running_mean"][:, None]) * scale[:, None] + s[f"{name}.bias"][:, None]


def attended(s: State, side: str, elements: Tensor) -> Tensor:
    """The global vector of one image or text."""
    place = f"{side}_global_w.embedding_"

    def layer(name: str, x: Tensor) -> Tensor:
        return x @ s[f"{place}{name}.0.weight"].T + s[f"{place}{name}.0.bias"]

    local, whole = layer("local", elements), layer("global", elements.mean(0, keepdim=True))
    if side == "v":
        local = normed(s, f"{place}local.1", local)
        whole = normed(s, f"{place}global.1", whole.T).T
    weights = torch.softmax(layer("common", local.tanh() * whole.tanh())[:, 0], dim=0)
    return unit(weights @ elements)


def sgraf_scores(kind: str, states: list[State], regions: Tensor) -> Tensor:
    image, text, s = ({name: value.double() for name, value in state.items()} for state in states)
    rnn = nn.GRU(WORD_DIM, DIM, batch_first=True, bidirectional=True).double()
    rnn.load_state_dict({name: text[f"cap_rnn.{name}"] for name in rnn.state_dict()})
    images, texts = [], []
    for one in regions.double():
        elements = unit(one @ image["fc.weight"].T + image["fc.bias"])
        images.append((attended(s, "v", elements), elements))
    for words in TEXTS:
        ids = [1, *(WORDS.index(word) if word in WORDS else 3 for word in words.split()), 2]
        out = rnn(text["embed.weight"][ids][None])[0][0].detach()
        elements = unit((out[:, :DIM] + out[:, DIM:]) / 2)
        texts.append((attended(s, "t", elements), elements))
    ends = ("weight", "bias")
    w = {f"vectors.local.{end}": s[f"sim_tranloc_w.{end}"] for end in ends}
    w |= {f"vectors.overall.{end}": s[f"sim_tranglo_w.{end}"] for end in ends}
    w |= {f"score.{end}": s[f"sim_eval_w.{end}"] for end in ends}
    if kind == "saf":
        w |= {f"filter.{end}": s[f"SAF_module.attn_sim_w.{end}"] for end in ends}
        w |= {f"norm.{end}": s[f"SAF_module.bn.{end}"] for end in (*ends, "running_mean", "running_var")}
        return score_matrix("saf", w, images, texts, training=False)[0]
    for step in range(3):
        for there, here in (("graph_query_w", "query"), ("graph_key_w", "key"), ("sim_graph_w", "mix")):
            w |= {f"steps.{step}.{here}.{end}": s[f"SGR_module.{step}.{there}.{end}"] for end in ends}
    bias = s["SGR_module.0.graph_key_w.bias"]
    rows = [
        [sgr_score(w, similarity_vectors(w, v, t, g_v, g_t), 3, bias) for g_t, t in texts]
        for g_v, v in images
    ]
    return torch.stack([torch.stack(row) for row in rows])


def save_sgraf(file: Path, states: list[State], **options: Any) -> Path:
    chosen = argparse.Namespace(**{"no_imgnorm": False, "no_txtnorm": False, "module_name": "SGR", **options})
    torch.save({"epoch": 3, "model": states, "best_rsum": 1.0, "opt": chosen, "Eiters": 9}, file)
    return file


@pytest.fixture
def words(tmp_path: Path) -> Path:
    file = tmp_path / "words.json"
    file.write_text(json.dumps(published_form(WORDS)))
    return file


@pytest.mark.parametrize("kind", ["sgr", "saf"])
def test_a_published_sgraf_checkpoint_gives_its_own_scores(tmp_path: Path, words: Path, kind: str) -> None:
    states, regions = (
        sgraf_states(kind),
        torch.randn(5, REGIONS, WIDTH, generator=torch.Generator().manual_seed(4)),
    )
    file = save_sgraf(tmp_path / "model_best.pth.tar", states)
    said = diptych("import", "sgraf", file, tmp_path / "model", "--vocabulary", words).stdout
    assert "diptych evaluate" in said
    expected = sgraf_scores(kind, states, regions)
    for model in (import_sgraf(file, vocabulary=words), Retriever.from_pretrained(tmp_path / "model")):
        found = model.scores(list(regions.numpy()), TEXTS).tile(slice(None), slice(None))
        assert torch.allclose(
            found.double(), expected, atol=2e-4
        )  # local features are kept in half precision
        model.double()
        assert model.scorer is not None
        with torch.no_grad():
            images = model.image(as_inputs(model.image_input(list(regions.numpy()))))[1]
            exact = model.scorer(images, model.text(as_inputs(model.text_input(TEXTS)))[1])
        assert torch.allclose(exact, expected, atol=1e-12)
    assert float(expected.std()) > 1e-3
    states[2]["sim_eval_w.weight"] *= -1  # the comparison would notice
    assert not torch.allclose(sgraf_scores(kind, states, regions), expected, atol=1e-3)


def test_sgraf_checkpoints_that_are_none(tmp_path: Path, words: Path) -> None:
    states = sgraf_states("sgr")
    with pytest.raises(CheckpointError, match="three encoders"):
        import_sgraf(save_sgraf(tmp_path / "two.pth", states[:2]), vocabulary=words)
    with pytest.raises(CheckpointError, match="no_imgnorm"):
        import_sgraf(save_sgraf(tmp_path / "norm.pth", states, no_imgnorm=True), vocabulary=words)
    del states[2]["sim_tranglo_w.bias"]
    with pytest.raises(CheckpointError, match=r"scorer\.vectors\.overall\.bias"):
        import_sgraf(save_sgraf(tmp_path / "less.pth", states), vocabulary=words)
    more = [*sgraf_states("saf")[:2], {**sgraf_states("saf")[2], "new.weight": torch.ones(2)}]
    with pytest.raises(CheckpointError, match=r"new\.weight"):
        import_sgraf(save_sgraf(tmp_path / "more.pth", more), vocabulary=words)
    with pytest.raises(SettingsError, match="--vocabulary"):
        import_sgraf(tmp_path / "more.pth")


# --- CUSA on OpenAI's CLIP: width 16, 2 layers of 2 heads, patches of 8 in 32 pixels, 12 dimensions


def block_shapes(place: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number in range(2):
        layer = f"{place}transformer.resblocks.{number}."
        found |= {f"{layer}attn.in_proj_weight": (48, 16), f"{layer}attn.in_proj_bias": (48,)}
        found |= linear(f"{layer}attn.out_proj", 16, 16)
        found |= linear(f"{layer}mlp.c_fc", 24, 16) | linear(f"{layer}mlp.c_proj", 16, 24)
        found |= {f"{layer}ln_{n}.{end}": (16,) for n in (1, 2) for end in ("weight", "bias")}
    return found


def cusa_state(tokens: int, uni: bool = True) -> State:
    clip, vision = "clip_model.", "clip_model.visual."
    shapes: dict[str, tuple[int, ...]] = {
        f"{vision}class_embedding": (16,), f"{vision}positional_embedding": (17, 16), f"{vision}proj": (16, 12),
        f"{vision}conv1.weight": (16, 3, 8, 8), f"{clip}positional_embedding": (20, 16),
        f"{clip}text_projection": (16, 12), f"{clip}token_embedding.weight": (tokens, 16),
        **block_shapes(vision), **block_shapes(clip),
    }  # fmt: skip
    for name in (f"{vision}ln_pre", f"{vision}ln_post", f"{clip}ln_final"):
        shapes |= {f"{name}.{end}": (16,) for end in ("weight", "bias")}
    for head in ("cross", "uni") if uni else ("cross",):
        for side in ("image", "text"):
            shapes |= linear(f"{head}_{side}_projection", 12, 12)
            shapes |= {f"ln_{head}_{side}_projection.{end}": (12,) for end in ("weight", "bias")}
    state = drawn(shapes, 5)
    one = torch.tensor(0.05)
    return state | {
        "tau": one,
        "cross_tau": 2 * one,
        "cross_the_softlabel_tau": 3 * one,
        "uni_tau_image": 4 * one,
    }


def clip_vector(s: State, place: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """The states (L, 16) behind the blocks: attention of torch, whose weights are one tensor, and quick GELU."""
    for number in range(2):
        layer = f"{place}transformer.resblocks.{number}."
        attention = nn.MultiheadAttention(16, 2, batch_first=True).double()
        inner = {name: s[f"{layer}attn.{name}"] for name in attention.state_dict()}
        attention.load_state_dict(inner)
        y = layer_norm(x, (16,), s[f"{layer}ln_1.weight"], s[f"{layer}ln_1.bias"])
        x = x + attention(y[None], y[None], y[None], attn_mask=mask, need_weights=False)[0][0].detach()
        y = layer_norm(x, (16,), s[f"{layer}ln_2.weight"], s[f"{layer}ln_2.bias"])
        y = y @ s[f"{layer}mlp.c_fc.weight"].T + s[f"{layer}mlp.c_fc.bias"]
        x = (
            x
            + (y * torch.sigmoid(1.702 * y)) @ s[f"{layer}mlp.c_proj.weight"].T
            + s[f"{layer}mlp.c_proj.bias"]
        )
    return x


def cusa_image(s: State, pixels: Tensor, head: str) -> Tensor:
    v = "clip_model.visual."
    cells = nn.functional.conv2d(pixels[None], s[f"{v}conv1.weight"], stride=8)[0].flatten(1).T
    x = torch.cat([s[f"{v}class_embedding"][None], cells]) + s[f"{v}positional_embedding"]
    x = clip_vector(s, v, layer_norm(x, (16,), s[f"{v}ln_pre.weight"], s[f"{v}ln_pre.bias"]), None)
    first = layer_norm(x[0], (16,), s[f"{v}ln_post.weight"], s[f"{v}ln_post.bias"]) @ s[f"{v}proj"]
    return headed(s, f"{head}_image", first)


def cusa_text(s: State, ids: Tensor, head: str) -> Tensor:
    c = "clip_model."
    x = s[f"{c}token_embedding.weight"][ids] + s[f"{c}positional_embedding"][: len(ids)]
    later = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)
    x = layer_norm(clip_vector(s, c, x, later), (16,), s[f"{c}ln_final.weight"], s[f"{c}ln_final.bias"])
    return headed(s, f"{head}_text", x[ids.argmax()] @ s[f"{c}text_projection"])


def headed(s: State, name: str, x: Tensor) -> Tensor:
    x = layer_norm(x, (12,), s[f"ln_{name}_projection.weight"], s[f"ln_{name}_projection.bias"])
    x = x @ s[f"{name}_projection.weight"].T + s[f"{name}_projection.bias"]
    return x / x.norm()


def test_a_published_cusa_checkpoint_gives_its_own_vectors(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path / "clip")
    tokens = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    state, file = cusa_state(tokens), tmp_path / "checkpoint_best.pth"
    torch.save({"model": state, "config": {"clip_model": "ViT-B/32"}, "epoch": 3, "best": 1.0}, file)
    diptych("import", "cusa", file, tmp_path / "model", "--model", folder)
    exact = {name: value.double() for name, value in state.items()}
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 36, 3), dtype=np.uint8))
    for model in (import_cusa(file, model=str(folder)), Retriever.from_pretrained(tmp_path / "model")):
        pixels = torch.from_numpy(np.asarray(model.image_input([picture]))[0]).double()
        ids = torch.from_numpy(model.text_input(["A dog!"]).values[0])
        assert ids.tolist() == model.text_input(["a dog"]).values[0].tolist()  # cleaned
        for head, view in (("cross", None), ("uni", "uni")):
            images, texts = model.encode_image([picture], view=view), model.encode_text(["a dog"], view=view)
            assert torch.allclose(images[0].double(), cusa_image(exact, pixels, head), atol=1e-5)
            assert torch.allclose(texts[0].double(), cusa_text(exact, ids, head), atol=1e-5)
        assert model.image.encoder.temperature == pytest.approx(0.05)
    torch.save({"model": cusa_state(tokens, uni=False), "config": {}}, file)
    assert import_cusa(file, model=str(folder)).encode_image([picture], view="uni").shape == (1, 12)
    assert "--model" in refused("import", "cusa", file, tmp_path / "other")
    state.pop("cross_text_projection.bias")
    torch.save({"model": state, "config": {}}, file)
    with pytest.raises(CheckpointError, match=r"text\.aggregator\.head\.1\.bias"):
        import_cusa(file, model=str(folder))
