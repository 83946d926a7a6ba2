"""Text trunks: ours, and those that transformers runs, which pads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.model.trunks.bert import TYPES, Bert, is_bert, positions_of
from kiloword.model.trunks.libraries import check_numbers, kept, quiet, transformers, unusable, without_pooling
from kiloword.model.trunks.library import OPEN_CLIP, HfWhole, OpenClipText
from kiloword.model.trunks.trunk import Trunk

CLASSES = {"clip_text_model": "CLIPTextModel", "siglip_text_model": "SiglipTextModel"}
ALONE = (*TYPES, "albert", "deberta-v2", "electra", "modernbert", "mpnet")
ENCODERS = (*ALONE, *CLASSES)
"""Encoders of texts, alone or of a model of images: their `model_type`."""


def text_trunk(config: TextConfig) -> Trunk:
    """The trunk of a text tower: ours where it computes the same, else transformers' own.

    Raises: ValueError for a trunk that does not exist, or that does not fit the config.
    """
    name, described = config.trunk.name, config.trunk.config
    if name.startswith(OPEN_CLIP):
        with unusable(f"the text trunk {name[:200]}"):
            return OpenClipText(name.removeprefix(OPEN_CLIP))
    kind = described.get("model_type")
    if name == "hf" and config.trunk.whole:
        with unusable(f"the text trunk {kind}"):
            return HfWhole(described, text=True)
    if name != "hf" or kind not in ENCODERS:
        raise ValueError(f"the text trunk {f'{name} {kind}'[:200]!r} is unknown: expected hf, {', '.join(ENCODERS)}")
    with unusable(f"the text trunk {kind}"):
        longest = positions_of(described)
        if config.context - len(config.extra_tokens) > longest:
            raise ValueError(
                f"the text trunk reads {longest} tokens of a text: choose a --model.text.context of {longest}, or less"
            )
        return (Bert(described) if is_bert(described) else PaddedText(described)).eval()


class PaddedText(Trunk):
    """An encoder of texts that transformers runs, with random weights: packed texts to tokens [S, W'].

    No code but transformers' own runs, and nothing is downloaded.

    Args: config: a config.json of transformers whose `model_type` is one of ENCODERS.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        check_numbers(config, "the config of the text trunk")
        library = transformers()
        maker, settings = made(library, config)
        with quiet(library):
            make = getattr(maker, "from_config", None)
            self.encoder = without_pooling(make(settings, trust_remote_code=False) if make else maker(settings))
        self.pad = int(config.get("pad_token_id") or 0)
        self.eval()

    def tokens(self, *inputs: Any) -> Tensor:
        """Tokens [S + tail, W'] of texts and their packing."""
        texts, packing = inputs
        out = self.encoder(input_ids=packing.pad(texts.ids, self.pad), attention_mask=packing.valid.long())
        tokens: Tensor = packing.unpad(out.last_hidden_state)
        return tokens

    def blocks(self) -> list[list[str]]:
        counts = {name: len(part) for name, part in self.named_modules() if isinstance(part, nn.ModuleList)}
        name = max(counts, key=counts.__getitem__)
        beside = [n for n, _ in self.named_parameters() if not n.startswith(f"{name}.")]
        blocks = [[f"{name}.{n}."] for n in range(counts[name])]
        blocks[0] = [*(n for n in beside if ".final_" not in n), *blocks[0]]
        blocks[-1] += [n for n in beside if ".final_" in n]
        return blocks


def made(library: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """The class of transformers, and its settings, for a config.json whose `model_type` is one of ENCODERS."""
    kind = config["model_type"]
    return getattr(library, CLASSES.get(kind, "AutoModel")), library.CONFIG_MAPPING[kind].from_dict(kept(config))
