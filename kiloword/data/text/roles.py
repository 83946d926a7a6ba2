"""The ids with a meaning of their own, and how a tokenizer.json keeps them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import processors

BEHIND = 16  # special ids that may stand behind the words


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The ids with a meaning of their own."""

    start: int
    end: int
    pad: int
    mask: int
    cls: int
    unc: int
    prefix: bool = True  # captions begin with `start`; SigLIP's do not

    def ids(self) -> dict[str, int]:
        """Every special id by the name of its role."""
        return {name: value for name, value in asdict(self).items() if name != "prefix"}

    def template(self) -> processors.TemplateProcessing:
        """How a tokenizer.json keeps the roles: as the special tokens of its template, named after the role."""
        tokens = [{"id": name, "ids": [value], "tokens": [f"<{name}>"]} for name, value in self.ids().items()]
        return processors.TemplateProcessing(
            single="start $A end" if self.prefix else "$A end",
            special_tokens=tokens,  # the stub leaves out this documented form
        )

    @staticmethod
    def read(document: dict[str, Any], words: int) -> Roles:
        """The roles a tokenizer.json keeps, of a vocabulary of so many words; ValueError when it is not one of ours."""
        template = document.get("post_processor") or {}
        try:
            ids = {name: int(entry["ids"][0]) for name, entry in (template.get("special_tokens") or {}).items()}
            prefix = "SpecialToken" in template["single"][0] if ids else False
        except (AttributeError, IndexError, KeyError, TypeError):
            ids, prefix = {}, False
        if any(not 0 <= value < words + BEHIND for value in ids.values()):
            raise ValueError(f"this tokenizer.json has special ids far from its {words:,} words: {ids}.")
        if set(ids) != {"start", "end", "pad", "mask", "cls", "unc"}:
            raise ValueError(
                "this tokenizer.json was not written by kiloword: it names no start, end, pad, mask, cls and unc ids. "
                "Train one (Tokenizer.train), or convert it (clip_tokenizer, siglip_tokenizer)."
            )
        return Roles(**ids, prefix=prefix)
