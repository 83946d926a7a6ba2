"""Encoders of texts alone as teachers: pooling, folders that cannot be used, transformers' own outputs, partners."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kiloword.cli.main import main
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import open_teacher

TEXTS = ["a red circle", "Two blue squares and a star", "a"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "circle", "two", "blue", "squares", "and", "star"]


class Inputs(dict[str, Tensor]):
    def to(self, device: str) -> Inputs:
        return self


class Encoder(torch.nn.Module):
    """A stand-in for what AutoModel opens: an embedding of each letter."""

    base_model_prefix = "bert"

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(200, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return types.SimpleNamespace(last_hidden_state=self.table(input_ids))


def letters(texts: Sequence[str], padding: bool, truncation: bool, max_length: int, return_tensors: str) -> Inputs:
    rows = [[ord(c) for c in text][:max_length] for text in texts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
    return Inputs(input_ids=ids, attention_mask=(ids > 0).long())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.manual_seed(0)
    encoder = Encoder()
    info: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    fake = types.SimpleNamespace(
        AutoModel=types.SimpleNamespace(from_pretrained=lambda *_, **__: (encoder, info)),
        AutoTokenizer=types.SimpleNamespace(from_pretrained=lambda *_, **__: letters),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    place = tmp_path / "minilm"
    (place / "1_Pooling").mkdir(parents=True)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES]
    (place / "modules.json").write_text(json.dumps(modules))
    (place / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (place / "config.json").write_text('{"model_type": "bert", "max_position_embeddings": 64}')
    save_file({"a": torch.zeros(1)}, place / "model.safetensors")
    return place


MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


def test_tokens_are_pooled_as_the_folder_says(folder: Path) -> None:
    table = sys.modules["transformers"].AutoModel.from_pretrained()[0].table.weight.detach()
    fingerprints = set[str]()
    for mode, pool in (
        ("mean_tokens", lambda x: x.mean(0)),
        ("cls_token", lambda x: x[0]),
        ("max_tokens", lambda x: x.amax(0)),
    ):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True, "other": 3}))
        teacher = open_teacher(f"hf:{folder}", "cpu")
        fingerprints.add(teacher.fingerprint)
        for text, row in zip(TEXTS, teacher.encode_texts(TEXTS), strict=True):
            tokens = table[[ord(c) for c in text.lower()[:9]]]
            torch.testing.assert_close(row, F.normalize(pool(tokens), dim=0))
    assert len(fingerprints) == 3
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    plain = open_teacher(f"hf:{folder}", "cpu")
    expected = torch.stack([table[[ord(c) for c in text]].mean(0) for text in TEXTS])
    torch.testing.assert_close(plain.encode_texts(TEXTS), F.normalize(expected, dim=1))
    assert plain.encode_texts([]).shape == (0, 6)


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("config.json", '{"model_type": "gpt2"}', "gpt2"),
        ("config.json", '{"model_type": "bert", "max_position_embeddings": 2}', "2 tokens"),
        ("modules.json", "{}", "no json list"),
        ("modules.json", '[{"type": "x.Transformer"}, {"type": "x.Dense"}]', "Dense"),
        ("modules.json", '[{"type": "Transformer"}, {"type": "Pooling", "path": "../../secret"}]', "secret"),
        ("1_Pooling/config.json", "{}", "nothing"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}', "cls_token"),
        ("1_Pooling/config.json", None, "1_Pooling/config.json"),
    ],
)
def test_folders_that_cannot_be_used(folder: Path, file: str, text: str | None, word: str) -> None:
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(ValueError, match=word):
        open_teacher(f"hf:{folder}", "cpu")


def test_partners_are_those_of_the_sentences(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the encoder to a run whose partners have the nearest captions (CLIP-C's ablation)."""
    store = tmp_path / "store"
    main(["embed", f"hf:{folder}", "--data", "scenes?n=12", "--out", str(store), "--device", "cpu"])
    assert "encodes texts alone" in capsys.readouterr().out
    table = FeatureStore(store)
    assert not np.asarray(table.images()).any()
    np.testing.assert_allclose(np.linalg.norm(np.asarray(table.texts(), np.float32), axis=1), 1, atol=1e-3)
    words = "train clip-c --data scenes?n=12 --size debug --batch 4 --steps 1 --vocab 300 --settings.partner nearest"
    main([*words.split(), "--settings.partner-table", str(store), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_equals_transformers(tmp_path: Path) -> None:
    """A tiny random BERT, saved and opened by transformers itself."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=10, **sizes)
    model = transformers.BertModel(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(str(tmp_path / "bert"))
    found = open_teacher(f"hf:{tmp_path / 'bert'}", "cpu").encode_texts([*TEXTS, "star " * 40])
    with torch.no_grad():
        for text, row in zip([*TEXTS, "star " * 40], found, strict=True):
            inputs = tokenizer([text], truncation=True, max_length=10, return_tensors="pt")
            tokens = model(**inputs).last_hidden_state[0]
            torch.testing.assert_close(row, F.normalize(tokens.mean(0), dim=0), atol=1e-5, rtol=1e-4)
