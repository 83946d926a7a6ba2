"""Text towers against transformers itself: hidden states of random weights, ids, folders that it wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from folders import BERT, DISTIL, ROBERTA, word_pieces
from kiloword.cli.main import main
from kiloword.config.recipes import TextConfig, sizes
from kiloword.interop import text_towers
from kiloword.methods.registry import preset
from kiloword.model.attention import Packing
from kiloword.model.trunks.bert import Bert, is_bert
from kiloword.model.trunks.libraries import transformers
from kiloword.model.trunks.padded import PaddedText
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.types import Texts

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", reason="transformers is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": {**ROBERTA, "model_type": "xlm-roberta", "hidden_act": "gelu"},
    "distilbert": DISTIL,
    "mpnet": {**BERT, "model_type": "mpnet", "pad_token_id": 1},
    "albert": {**BERT, "model_type": "albert", "embedding_size": 16},
    "electra": {**BERT, "model_type": "electra", "embedding_size": 16},
    "deberta-v2": {**BERT, "model_type": "deberta-v2", "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "modernbert": {**BERT, "model_type": "modernbert"},
    "clip": {**BERT, "model_type": "clip_text_model", "eos_token_id": 3, "bos_token_id": 2},
    "siglip": {**BERT, "model_type": "siglip_text_model", "projection_size": 24},
    "bert with relu": {**BERT, "hidden_act": "relu"},
}
IDS = [[2, 7, 8, 3], [2, 3], [2, 9, 8, 7, 6, 5, 20, 11, 12, 3], [2, 44, 3]]
TEXTS = Texts.pack(IDS)


def random_model(config: dict[str, Any]) -> Any:
    """transformers' own model with larger weights than its initial ones, which would hide differences."""
    library = transformers()
    kind = config["model_type"]
    if kind in ("clip_text_model", "siglip_text_model"):  # a whole model, whose text half is the tower
        name = "CLIP" if kind.startswith("clip") else "Siglip"
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        whole = getattr(library, f"{name}Config")(text_config=config, vision_config={**vision, "image_size": 32})
        model = getattr(library, f"{name}Model")(whole)
    else:
        model = library.AutoModel.from_config(library.CONFIG_MAPPING[kind].from_dict(config))
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    return model.eval()


def alone(model: Any) -> Tensor:
    """Hidden states of each text by itself, end to end: no padding at all."""
    model = getattr(model, "text_model", model)
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in IDS])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """From a folder that it wrote, for texts of unequal lengths."""
    model = random_model(KINDS[kind])
    model.save_pretrained(str(tmp_path))
    word_pieces().save(str(tmp_path / "tokenizer.json"))
    config = text_towers.with_text_tower(sizes()["debug"], f"hf:{tmp_path}")
    trunk = build(config, preset("clip"), seed=0).text_tower.trunk
    assert trunk is not None
    assert isinstance(trunk, Bert if kind in ("bert", "roberta", "xlm-roberta", "distilbert") else PaddedText)
    assert is_bert(KINDS[kind]) == isinstance(trunk, Bert)
    message = text_towers.load(trunk, f"hf:{tmp_path}")
    assert ("padded" in message) == isinstance(trunk, PaddedText)
    for packing in (Packing.of(TEXTS), Packing.of(TEXTS, 16)):
        tokens = trunk(TEXTS, packing)[: len(TEXTS.ids)]
        torch.testing.assert_close(tokens, alone(model), rtol=0, atol=1e-5)
    prefixes = [prefix for block in trunk.blocks() for prefix in block]
    assert all(sum(name.startswith(prefix) for prefix in prefixes) == 1 for name, _ in trunk.named_parameters())


def test_train_on_a_tower_that_transformers_runs(tmp_path: Path) -> None:
    """The text half of a CLIP: its weights stay, and the model needs the folder no more."""
    folder = tmp_path / "clip"
    random_model(KINDS["clip"]).save_pretrained(str(folder))
    word_pieces().save(str(folder / "tokenizer.json"))
    trunk = PaddedText(text_towers.read_text_folder(f"hf:{folder}").config)
    text_towers.load(trunk, f"hf:{folder}")
    expected = trunk.state_dict()
    command = ["train", "prolip", "--text-tower", f"hf:{folder}", "--size", "debug", "--steps", "2", "--batch", "4"]
    main([*command, "--workers", "0", "--data", "scenes?n=64", "--out", str(tmp_path / "run")])
    shutil.rmtree(folder)
    model, tokenizer = load_model(tmp_path / "run/model")
    state = model.text_tower.state_dict()
    assert all(torch.equal(state[f"trunk.{name}"], value) for name, value in expected.items())
    texts = tokenizer.encode(["a red circle", "large green square of the left"], model.config.text)
    with torch.no_grad():
        both = model.encode_text(texts)[1]["vec"]
        single = torch.cat([model.encode_text(texts.cut(t, t + 1))[1]["vec"] for t in range(2)])
    torch.testing.assert_close(both, single, rtol=0, atol=1e-5)


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    words = [w for w in Path(__file__).read_text(encoding="utf-8").split("\n") if "[" not in w]
    captions = [
        *words,
        "Ünïcödé e\u0301",
        "日本 red 猫",
        "😀 👨‍👩‍👧",
        "don't — “quotes”",
        "İstanbul",
        "",
        "  ",
        "x" * 150,
    ]
    transformers().PreTrainedTokenizerFast(
        tokenizer_object=word_pieces(), cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]"
    ).save_pretrained(str(tmp_path))
    random_model(BERT).save_pretrained(str(tmp_path))
    theirs = transformers().AutoTokenizer.from_pretrained(str(tmp_path))
    own = text_towers.tokenizer_of(f"hf:{tmp_path}")
    config = TextConfig(context=1000, vocab=own.vocab, special=own.roles.ids())
    assert len(captions) > 100
    for caption in captions:
        assert own.encode([caption], config).ids.tolist() == theirs(caption, truncation=False)["input_ids"], caption
