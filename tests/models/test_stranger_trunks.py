"""Model folders of strangers whose towers stand on a trunk: data, never code, and of bounded size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import ModelFile
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.models.model_folder import load_model, save_model
from kiloword.verify.batch import config
from kiloword.verify.suite import learner

CODE = "stranger_trunk_code"  # a module on the path, which writes a file when imported
VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
IMAGE: list[dict[str, Any]] = [
    {"name": "os:system"},
    {"name": f"{CODE}:make"},
    {"name": f"timm:{CODE}"},
    {"name": "timm:hf-hub:someone/model"},
    {"name": "timm:local-dir:/tmp"},
    {"name": "open_clip:hf-hub:someone/model"},
    {"name": "hf", "config": {"model_type": CODE}},
    {"name": "hf", "config": {}},
    {"name": "hf", "config": {**VIT, "num_hidden_layers": 100_000}},
    {"name": "hf", "config": {**VIT, "hidden_size": 10**12}},
    {"name": "hf", "config": {"model_type": "other", "auto_map": {"AutoModel": f"{CODE}.Model"}}},
    {"name": "efficientnet-lite0"},  # other shapes than the weights have
    {"grid": 8192},
    {"width": 65_536},
    {"prefix": 4096},
    {"grid": -1},
    {"config": "x"},
]
TEXT: list[dict[str, Any]] = [
    {"name": CODE},
    {"config": {"model_type": CODE, "auto_map": {"AutoModel": f"{CODE}.Model"}}},
    {"config": {"model_type": "bert", "hidden_size": 24, "num_hidden_layers": 100_000}},
    {"config": {"model_type": "bert", "hidden_size": 24, "vocab_size": 10**12}},
    {"config": {"model_type": "bert", "hidden_size": 25}},
    {"width": 65_536},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with trunks below both towers."""
    folder = tmp_path_factory.mktemp("stranger")
    small = learner("siglip", trunks="frozen").float().model
    file = ModelFile(method="siglip", settings={}, model=config("frozen"), size="debug")
    save_model(folder, small, Tokenizer.train(["a small red star"], 300), file)
    return folder


@pytest.mark.parametrize(("tower", "change"), [*(("image", c) for c in IMAGE), *(("text", c) for c in TEXT)])
def test_trunks_of_strangers(
    model: Path, tower: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{CODE}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef make(*_): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    document = json.loads((folder / "config.json").read_text())
    document["model"][tower]["trunk"] |= change
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"\w"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()
    assert CODE not in sys.modules


def test_the_folder_itself_is_fine(model: Path) -> None:
    """So that the refusals above are of the changes."""
    loaded, _ = load_model(model)
    assert loaded.config.image.trunk.name == config("frozen").image.trunk.name
    assert loaded.config.text.trunk.name == "hf"
