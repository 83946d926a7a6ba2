"""How a tokenizer.json stores the special ids, and which components one from an unknown source may have.

The tokenizers library runs whatever the file contains, such as padding to 10^8 ids, repeated replacement of a letter by
eight letters, or a regular expression with catastrophic backtracking. The checks bound the cost of a caption.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

AFTER = 16  # special ids that may follow the vocabulary
VERBATIM = "verbatim"  # name of a mark among the special tokens of a file; its id has no meaning


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The special ids."""

    start: int
    end: int
    pad: int
    mask: int
    cls: int
    unc: int
    prefix: bool = True  # captions begin with `start`; not SigLIP's
    verbatim: bool = False  # captions are cleaned by the file's own normalizer alone

    def ids(self) -> dict[str, int]:
        """The special ids by name."""
        return {name: value for name, value in asdict(self).items() if name not in ("prefix", "verbatim")}

    def template(self) -> processors.TemplateProcessing:
        """How a tokenizer.json stores the roles: as the special tokens of its template, by name."""
        ids = {**self.ids(), **({VERBATIM: self.end} if self.verbatim else {})}
        tokens = [{"id": name, "ids": [value], "tokens": [f"<{name}>"]} for name, value in ids.items()]
        return processors.TemplateProcessing(
            single="start $A end" if self.prefix else "$A end",
            special_tokens=tokens,  # the stub lacks this documented form
        )

    @staticmethod
    def read(document: dict[str, Any], words: int) -> Roles:
        """The roles in a tokenizer.json. Args: words: size of its vocabulary. Errors: ValueError if it is not ours."""
        template = document.get("post_processor") or {}
        try:
            ids = {name: int(entry["ids"][0]) for name, entry in (template.get("special_tokens") or {}).items()}
            prefix = "SpecialToken" in template["single"][0] if ids else False
        except (AttributeError, IndexError, KeyError, TypeError):
            ids, prefix = {}, False
        verbatim = ids.pop(VERBATIM, None) is not None
        if any(not 0 <= value < words + AFTER for value in ids.values()):
            raise ValueError(f"this tokenizer.json has special ids far from its {words:,} words: {ids}.")
        if set(ids) != {"start", "end", "pad", "mask", "cls", "unc"}:
            raise ValueError(
                "this tokenizer.json was not written by kiloword: it names no start, end, pad, mask, cls and unc ids. "
                "Train one (Tokenizer.train), or convert it (clip_tokenizer, siglip_tokenizer)."
            )
        return Roles(**ids, prefix=prefix, verbatim=verbatim)


LARGEST = 1 << 26  # largest tokenizer.json in bytes; published ones have at most half of it
LONGEST_TOKEN = 512  # characters; 128 in published vocabularies
LONGEST_WORD = 16  # characters that a component adds between or around words
ADDED = 1 << 20  # characters of all added tokens
COMPONENTS = 24  # of one kind, such as normalizers
EXPANDED = 256  # bytes of a character after a normalizer's table; about 50 in published ones

CLIP_START, CLIP_END = "<start_of_text>", "<end_of_text>"
# CLIP's pattern ignores case: in lower-cased text that matters for the long s, which folds to s, and for one mark,
# U+0345: it folds to a letter without being one, so that no part of the pattern takes it.
CLIP_WORDS = rf"{CLIP_START}|{CLIP_END}|'[sſ]|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}\x{{345}}]+"
_CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # regular expressions with linear time -> smallest length of a match
    CLIP_WORDS: 1,
    rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP}": 1,
    _CLIP: 1,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": 1,  # GPT-2
    _LLAMA % r"\p{N}{1,3}": 1,
    _LLAMA % r"\p{N}": 1,  # Qwen
    r"\s+": 1,
    r"[!-/:-@\[-`{-~]": 1,  # of an export of SigLIP's vocabulary
    " {2,}": 2,  # sentencepiece
}
ALLOWED = {
    "normalizer": "NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer Replace Precompiled Prepend "
    "ByteLevel",
    "pre_tokenizer": "ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer CharDelimiterSplit Digits "
    "Punctuation UnicodeScripts Split",
    "decoder": "ByteLevel Metaspace WordPiece BPEDecoder ByteFallback Fuse Strip Replace CTC",
    "post_processor": "TemplateProcessing BertProcessing RobertaProcessing ByteLevel",
}
REPEATED = ("Replace", "Split", "Strip")  # may be repeated, as they make no text longer


def read(path: Path) -> str:
    """Read a tokenizer.json that the tokenizers library can open and that passes `check`.

    Raises: ValueError when the file is missing, damaged or not allowed.
    """
    if not path.is_file():
        raise ValueError(f"no tokenizer.json at {path}; expected a model folder written by kiloword")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: expected a tokenizer.json of at most {LARGEST:,}.")
    document = path.read_text(encoding="utf-8", errors="replace")
    try:
        check(document)
        tokenizers.Tokenizer.from_str(document)
    except BaseException as error:  # the library raises bare Exception for damaged files, and panics for some
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"damaged tokenizer file {path}: {error}"[:500]) from error
    return document


def check(document: str) -> None:
    """Raises: ValueError for a component that could lengthen a text, or whose time is not linear."""
    try:
        parsed = json.loads(document)
        for kind in ALLOWED:
            _check_components(kind, _flat(parsed.get(kind)))
        _check_words(parsed)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not what the tokenizers library writes ({type(error).__name__}: {error})") from error


def _flat(component: Any) -> list[dict[str, Any]]:
    """The components of a Sequence, including nested ones."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    lists = ("normalizers", "pretokenizers", "processors", "decoders")
    return [inner for name in lists for part in component.get(name, ()) for inner in _flat(part)]


def _check_components(kind: str, components: list[dict[str, Any]]) -> None:
    names = [component["type"] for component in components]
    allowed = ALLOWED[kind].split()
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(f"its {kind} has the component {unknown[0]!r}: expected one of {', '.join(allowed)}")
    twice = [name for name in names if names.count(name) > 1 and name not in REPEATED]
    if twice or len(names) > COMPONENTS:
        raise ValueError(f"its {kind} has {len(names)} components, {', '.join(twice[:2]) or 'too many'} more than once")
    for component in components:
        _check_pattern(kind, component)
        _check_length(kind, component)


def _check_pattern(kind: str, component: dict[str, Any]) -> None:
    """Check the pattern of Split and Replace; a match may not become longer."""
    pattern = component.get("pattern")
    if not isinstance(pattern, dict):
        return
    regex, least = pattern.get("Regex"), len(pattern.get("String", ""))
    if regex is not None:
        if regex not in PATTERNS:
            raise ValueError(
                f"its {kind} searches by the regular expression {regex[:80]!r}: only those of published tokenizers are "
                "known to take linear time (CLIP, GPT-2, Llama 3, Qwen, sentencepiece)"
            )
        least = PATTERNS[regex]
    if not least or len(component.get("content", "")) > least:
        raise ValueError(f"its {kind} replaces {least} characters by {len(component.get('content', ''))}: a text grows")


def _check_length(kind: str, component: dict[str, Any]) -> None:
    """Check the length of the text that a component adds, or replaces a character by."""
    for name in ("content", "prepend", "replacement", "prefix", "suffix", "delimiter", "pad_token"):
        if len(component.get(name) or "") > LONGEST_WORD:
            raise ValueError(f"its {kind} has a {name} of {len(component[name]):,} characters")
    for name in ("single", "pair"):
        if len(component.get(name) or "") > LONGEST_WORD:
            raise ValueError(f"its {kind} puts {len(component[name]):,} components in a row")
    if component["type"] == "Precompiled":
        table = base64.b64decode(component["precompiled_charsmap"], validate=True)
        if not 4 <= 4 + int.from_bytes(table[:4], "little") <= len(table):
            raise ValueError(f"its {kind} has a truncated table")
        strings = table[4 + int.from_bytes(table[:4], "little") :]  # after the trie; each ends with a zero
        if max(map(len, strings.split(b"\0"))) > EXPANDED:
            raise ValueError(f"its {kind} makes more than {EXPANDED} bytes of a character")


def _check_words(parsed: dict[str, Any]) -> None:
    """Check the vocabulary, and what the model adds to its words."""
    added = sum(len(token["content"]) for token in parsed.get("added_tokens") or ())
    if added > ADDED:
        raise ValueError(f"its added tokens have {added:,} characters: expected at most {ADDED:,}")
    model = parsed.get("model")
    if model is None:
        return
    words = model.get("vocab") or ()
    longest = max((len(word if isinstance(word, str) else word[0]) for word in words), default=0)
    if longest > LONGEST_TOKEN:
        raise ValueError(f"a token of its vocabulary has {longest:,} characters: expected at most {LONGEST_TOKEN}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if len(model.get(name) or "") > LONGEST_TOKEN // 8:
            raise ValueError(f"its model has a {name} of {len(model[name]):,} characters")
    if (model.get("max_input_chars_per_word") or 0) > LONGEST_TOKEN:
        raise ValueError(f"its model has words of {model['max_input_chars_per_word']:,} characters")
    if model.get("dropout"):
        raise ValueError("its model drops merges at random: the same caption would get other tokens each time")
