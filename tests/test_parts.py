"""Parts may be shared, and are always found: by name, by plugin, in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from diptych.aggregators import Mean
from diptych.data.images import RegionInput
from diptych.data.text import WordInput
from diptych.encoders.bigru import BiGRU
from diptych.encoders.regions import Regions
from diptych.errors import CheckpointError, SettingsError
from diptych.model.retriever import Retriever, Tower
from diptych.parts import PARTS, describe, find_part, own_parts, part, rebuild
from diptych.weights import aliases, load_weights, save_weights

VOCABULARY = ["<pad>", "<start>", "<end>", "<unk>", "a", "b"]


@part
class Leaf(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


@part
class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, more: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.more = nn.ModuleList(more or [])


def test_a_shared_part_is_written_once_and_rebuilt_shared() -> None:
    leaf = Leaf(3)
    config = describe(Pair(leaf, leaf, [leaf, Leaf(2)]))
    assert config["first"]["as"] == 1
    assert config["second"] == {"is": 1} == config["more"][0]
    assert "as" not in config["more"][1]
    again = rebuild(json.loads(json.dumps(config)))
    assert again.first is again.second is again.more[0]
    assert again.first is not again.more[1]


def test_equal_but_separate_parts_stay_separate() -> None:
    config = describe(Pair(Leaf(), Leaf()))
    assert config["second"]["part"] == "Leaf"
    again = rebuild(config)
    assert again.first is not again.second


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"\b7\b"):
        rebuild({"part": "Pair", "first": {"is": 7}, "second": {"part": "Leaf"}})


def test_shared_weights_are_saved_once(tmp_path: Path) -> None:
    leaf = Leaf()
    pair = Pair(leaf, leaf)
    save_weights(pair, tmp_path / "w.safetensors")
    other = Leaf()
    fresh = Pair(other, other)
    assert set(aliases(fresh)) == {"second.linear.weight", "second.linear.bias"}
    load_weights(fresh, tmp_path / "w.safetensors")
    assert torch.equal(fresh.second.linear.weight, leaf.linear.weight)
    with pytest.raises(
        RuntimeError, match=r"second\.linear\.weight"
    ):  # weights that were shared, a model that is not
        load_weights(Pair(Leaf(), Leaf()), tmp_path / "w.safetensors")


def test_a_model_whose_towers_share_an_aggregator_and_an_encoder_round_trips(tmp_path: Path) -> None:
    pool = Mean()
    shared = Regions(4, 6, drop=0.0)
    model = Retriever(
        Tower(shared, pool), Tower(shared, pool), RegionInput(4), WordInput(VOCABULARY, augment=0.0)
    )
    model.save_pretrained(tmp_path / "model")
    loaded = Retriever.from_pretrained(tmp_path / "model")
    assert loaded.image.encoder is loaded.text.encoder
    assert loaded.image.aggregator is loaded.text.aggregator
    assert loaded.fingerprint() == model.fingerprint()
    x = torch.randn(3, 5, 4)
    assert torch.equal(loaded.encode_image(list(x.numpy())), model.encode_image(list(x.numpy())))


PLUGIN = """
from torch import nn
from diptych.aggregators import Aggregator
from diptych.parts import part
from diptych.ops import masked_mean

@part
class TwiceMean(Aggregator):
    def forward(self, features):
        return 2 * masked_mean(features.values, features.mask)
"""


def test_a_part_of_a_users_module_is_found_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pools.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    from my_pools import TwiceMean  # type: ignore[import-not-found]

    model = Retriever(
        Tower(Regions(4, 6, drop=0.0), TwiceMean()),
        Tower(BiGRU(6, 3, 6), Mean()),
        RegionInput(4),
        WordInput(VOCABULARY, augment=0.0),
    )
    model.save_pretrained(tmp_path / "model")
    load = "from diptych import Retriever; print(Retriever.from_pretrained('model').fingerprint())"

    def fresh(**variables: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parent.parent / "src")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)]), **variables}
        return subprocess.run(
            [sys.executable, "-c", load], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert fresh(DIPTYCH_PLUGINS="my_pools").stdout.strip() == model.fingerprint()
    refused = fresh(DIPTYCH_PLUGINS="").stderr
    assert "'TwiceMean'" in refused
    assert "DIPTYCH_PLUGINS=my_pools" in refused
    assert "DIPTYCH_PLUGINS names 'no_such'" in fresh(DIPTYCH_PLUGINS="no_such").stderr


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.names import import_plugins

    monkeypatch.setenv("DIPTYCH_PLUGINS", "no_such_module")
    with pytest.raises(SettingsError, match="no_such_module"):
        import_plugins()


def test_a_part_is_found_without_importing_the_others() -> None:
    code = (
        "import sys; from diptych.parts import rebuild; rebuild({'part': 'WordInput', 'words': "
        f"{VOCABULARY!r}, 'augment': 0}}); print([m for m in sys.modules if m.startswith('diptych.encoders')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_part_of_the_package_is_found() -> None:
    for name, module in own_parts().items():
        kind = find_part(name)
        assert kind is not None
        assert (kind.__module__, kind.__name__) == (module, name)
    assert {(m, n) for m, n in PARTS if m.startswith("diptych.")} == {(m, n) for n, m in own_parts().items()}


def test_a_model_folder_does_not_import_the_module_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_pools.py").write_text(PLUGIN.replace("TwiceMean", "GPO"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DIPTYCH_PLUGINS", "")
    with pytest.raises(CheckpointError, match="acme_pools"):
        rebuild({"part": "GPO", "from": "acme_pools"})
    assert "acme_pools" not in sys.modules
    monkeypatch.setenv("DIPTYCH_PLUGINS", "acme_pools")  # a part of the same name as one of ours
    assert type(rebuild({"part": "GPO", "from": "acme_pools"})).__module__ == "acme_pools"
    assert type(rebuild({"part": "GPO"})).__module__ == "diptych.aggregators.gpo"
