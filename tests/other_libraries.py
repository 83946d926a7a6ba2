"""Small models of transformers with random weights, and a vocabulary of SigLIP's kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F

from folders import word_pieces
from kiloword import Matcher
from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.model.trunks.libraries import torchvision_ready, transformers
from kiloword.training.log import read_metrics

SIDE = 32
WORDS = {"vocab_size": 91, "max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
"""The ids of `save_whole` in the settings of a text tower."""
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES: dict[str, dict[str, Any]] = {  # of images, in the settings of an image processor
    "CLIP": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "resample": 3},
    "Siglip": {"size": {"height": SIDE, "width": SIDE}, "resample": 3},
}


def stirred(model: Any) -> Any:
    """With weights off the values where an error would not show."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def word_vocabulary(folder: Path, words: Sequence[str] = ("a", "dog", "cat", "क", "s")) -> Path:
    """The tokenizer.json of a small SigLIP in a folder. Returns: the folder."""
    folder.mkdir(exist_ok=True)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def of_transformers(kind: str, **text: Any) -> Any:
    """A model. Args: kind: how its class begins, such as "CLIP" or "Siglip"; text: settings of its text tower."""
    torchvision_ready()
    library = pytest.importorskip("transformers", reason="needs transformers")
    text, vision = (
        {**TOWER, **({"vocab_size": 8} if kind == "Siglip" else {}), **text},
        TOWER | {"image_size": SIDE, "patch_size": 8},
    )
    config = getattr(library, f"{kind}Config")(text_config=text, vision_config=vision, projection_dim=24)
    return stirred(getattr(library, f"{kind}Model")(config))


def first_losses(model: Matcher, name: str, out: Path) -> tuple[float, float]:
    """The loss of the first step of a run from a model with this name, and the loss that the model's scores have."""
    data, side = "scenes?n=16&captions=1", model.model.config.image.size
    train = f"train {model.method.name} --init {name} --data {data} --steps 1 --batch 16 --workers 0 --log-every 1"
    main([*train.split(), "--out", str(out)])
    source = open_source(data, side)
    rows = [source.record(row) for row in range(16)]
    scores = model.score([model.preprocess(row.image) for row in rows], [row.captions[0] for row in rows])
    with torch.no_grad():
        logits, match = model.model.head.logits(scores), torch.eye(16)
    expected = (F.cross_entropy(logits, match) + F.cross_entropy(logits.T, match)) / 2
    if model.method.name == "siglip":
        expected = -F.logsigmoid(logits * (2 * match - 1)).sum() / 16
    return read_metrics(out / "metrics.jsonl")[0]["loss"], float(expected)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """A folder of transformers with weights and the settings of images, but no tokenizer. Returns: the folder."""
    model.save_pretrained(folder, **options)
    kind = "Siglip" if type(model).__name__ in ("SiglipModel", "BlipModel", "CLIPSegModel") else "CLIP"
    (folder / "preprocessor_config.json").write_text(json.dumps(SIZES[kind]))
    return folder


def save_whole(model: Any, folder: Path) -> Path:
    """A folder of transformers with everything that a model is read from. Returns: the folder."""
    limits = {"pad_token": "[PAD]", "model_max_length": 16}
    transformers().PreTrainedTokenizerFast(tokenizer_object=word_pieces(), **limits).save_pretrained(str(folder))
    return save(model, folder)
