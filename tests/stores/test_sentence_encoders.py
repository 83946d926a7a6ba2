"""Encoders of texts alone as teachers: pooling of transformers' own outputs, folders that cannot be used, partners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kiloword.cli.main import main
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.stores.features import FeatureStore
from kiloword.stores.teachers import open_teacher

TEXTS = ["a red circle", "Two blue squares and a star", "a", "star " * 40]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "two", "blue", "squares", "and", "star"]
MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, Any]:
    """A tiny random BERT as sentence-transformers saves it, and what transformers makes of a text."""
    torchvision_ready()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    place = tmp_path / "minilm"
    (place / "1_Pooling").mkdir(parents=True)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=10, **sizes)
    model = transformers.BertModel(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(str(place))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES]
    (place / "modules.json").write_text(json.dumps(modules))
    (place / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    (place / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')

    def tokens(text: str, length: int) -> torch.Tensor:
        with torch.no_grad():
            inputs = tokenizer([text], truncation=True, max_length=length, return_tensors="pt")
            found: torch.Tensor = model(**inputs).last_hidden_state[0]
            return found

    return place, tokens


def test_tokens_are_pooled_as_the_folder_says(bert: tuple[Path, Any]) -> None:
    """Lower case and cut as it says too; without its files, the mean of all tokens that the encoder takes."""
    folder, tokens = bert
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
            expected = F.normalize(pool(tokens(text.lower(), 9)), dim=0)
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
    assert len(fingerprints) == 3
    for file in ("modules.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    plain = open_teacher(f"hf:{folder}", "cpu")
    for text, row in zip(TEXTS, plain.encode_texts(TEXTS), strict=True):
        torch.testing.assert_close(row, F.normalize(tokens(text, 10).mean(0), dim=0), atol=1e-5, rtol=1e-4)
    assert plain.encode_texts([]).shape == (0, 16)


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
def test_folders_that_cannot_be_used(bert: tuple[Path, Any], file: str, text: str | None, word: str) -> None:
    if text is None:
        (bert[0] / file).unlink()
    else:
        (bert[0] / file).write_text(text)
    with pytest.raises(ValueError, match=word):
        open_teacher(f"hf:{bert[0]}", "cpu")


def test_partners_are_those_of_the_sentences(
    bert: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the encoder to a run whose partners have the nearest captions (CLIP-C's ablation)."""
    store = tmp_path / "store"
    main(["embed", f"hf:{bert[0]}", "--data", "scenes?n=12", "--out", str(store), "--device", "cpu"])
    assert "encodes texts alone" in capsys.readouterr().err
    table = FeatureStore(store)
    assert not np.asarray(table.images()).any()
    np.testing.assert_allclose(np.linalg.norm(np.asarray(table.texts(), np.float32), axis=1), 1, atol=1e-3)
    words = "train clip-c --data scenes?n=12 --size debug --batch 4 --steps 1 --vocab 300 --settings.partner nearest"
    main([*words.split(), "--settings.partner-table", str(store), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
