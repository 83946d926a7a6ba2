"""Tokenizers: captions to packed token ids and back, by our byte-level BPE, CLIP's or SigLIP's vocabulary.

Captions are cleaned before they are split into tokens, as the vocabulary requires.
"""

from __future__ import annotations

import gzip
import html
import importlib.util
import json
import os
import re
import string
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kiloword.config.recipes import TextConfig
from kiloword.errors import needs, note_truncated
from kiloword.files import write_atomic
from kiloword.types import Texts

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of the library would make forked workers hang
LARGEST = 1 << 26  # largest tokenizer.json in bytes; published ones have at most half of it
LEARNED = 1 << 16  # characters of a caption that train a vocabulary; of a word, those before the end of _LONG_WORD
_LONG_WORD = re.compile(r"(\S{1024})\S+")
REMEMBERED = 1 << 15  # captions whose ids are kept
_MERGES = 49152 - 256 - 2  # of CLIP
_CLIP_START, _CLIP_END = "<start_of_text>", "<end_of_text>"
# CLIP's pattern ignores case: in lower-cased text that matters for the long s, which folds to s, and for one mark,
# U+0345: it folds to a letter without being one, so that no part of the pattern takes it.
_CLIP_WORDS = (
    rf"{_CLIP_START}|{_CLIP_END}|'[sſ]|'t|'re|'ve|'m|'ll|'d|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}\x{{345}}]+"
)
_ROLES = ("start", "end", "pad", "mask", "cls", "unc")
_VERBATIM = "verbatim"  # name of a mark among the special tokens of a file; its id has no meaning


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
        return {name: getattr(self, name) for name in _ROLES}

    def template(self) -> processors.TemplateProcessing:
        """How a tokenizer.json stores the roles: as the special tokens of its template, by name."""
        ids = {**self.ids(), **({_VERBATIM: self.end} if self.verbatim else {})}
        tokens = [{"id": name, "ids": [value], "tokens": [f"<{name}>"]} for name, value in ids.items()]
        return processors.TemplateProcessing(
            single="start $A end" if self.prefix else "$A end",
            special_tokens=tokens,  # the stub lacks this documented form
        )

    @staticmethod
    def read(document: dict[str, Any], words: int) -> Roles:
        """The roles in a tokenizer.json. Args: words: size of its vocabulary. Errors: ValueError if it is not ours."""
        try:
            template = document["post_processor"]
            ids = {name: int(entry["ids"][0]) for name, entry in template["special_tokens"].items()}
            verbatim = ids.pop(_VERBATIM, None) is not None
            if all(0 <= value < words + 16 for value in ids.values()):  # at most 16 follow the vocabulary
                return Roles(**ids, prefix="SpecialToken" in template["single"][0], verbatim=verbatim)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            pass
        raise ValueError(
            "this tokenizer.json was not written by kiloword: it names no start, end, pad, mask, cls and unc ids near "
            "its vocabulary. Train one (Tokenizer.train), or convert it (clip_tokenizer, siglip_tokenizer)."
        )


@contextmanager
def _library(what: str) -> Iterator[None]:
    """Errors of the tokenizers library, which raises bare exceptions and panics, as a ValueError that begins so."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}"[:500]) from error


def read_document(path: Path) -> str:
    """The text of a tokenizer.json that the tokenizers library can open. Errors: ValueError for others."""
    if not path.is_file():
        raise ValueError(f"no tokenizer.json at {path}; expected a model folder written by kiloword")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes: expected a tokenizer.json of at most {LARGEST:,}.")
    with _library(f"damaged tokenizer file {path}"):
        document = path.read_text(encoding="utf-8")
        tokenizers.Tokenizer.from_str(document)
    return document


class Tokenizer:
    """Captions to packed ids, ids to text; self-contained in one `tokenizer.json` of the `tokenizers` library.

    Our vocabularies lower-case and normalise white space; CLIP's and SigLIP's clean text as open_clip does.
    """

    def __init__(self, document: str) -> None:
        self._backend = tokenizers.Tokenizer.from_str(document)
        parsed = json.loads(document)
        self._backend.no_padding()
        self._backend.no_truncation()
        self.roles = Roles.read(parsed, self._backend.get_vocab_size())
        model = parsed["model"]
        if model.get("dropout"):
            self._backend.model.dropout = None  # the same caption would get other tokens each time
        bpe: Clean = "clip" if model.get("end_of_word_suffix") == "</w>" else "plain"
        clean: Clean | None = {"BPE": bpe, "Unigram": "siglip"}.get(model.get("type"))
        if clean is None and not self.roles.verbatim:
            raise ValueError(
                f"this tokenizer.json holds a model of type {model.get('type')!r}: expected BPE or Unigram."
            )
        self.clean: Clean = clean if clean and not self.roles.verbatim else "encodable"
        # "<mask>" in a caption is text; only CLIP's pattern finds its two markers in captions.
        self._backend.encode_special_tokens = self.clean != "clip"
        self._words = lru_cache(REMEMBERED)(self._encode)  # captions of small data sets recur

    @staticmethod
    def train(captions: Iterable[str], vocab: int) -> Tokenizer:
        """A byte-level BPE of at most `vocab` ids; the same captions in any order give the same bytes.

        Only the first 1,024 characters of a word and 65,536 of a caption are used, as the time is quadratic in them.
        Errors: ValueError when `vocab` is too small for the 256 bytes and six special tokens.
        """
        if vocab < 256 + len(_ROLES):
            raise ValueError(f"tokenizer vocabulary is {vocab}: expected at least 262 (bytes and special tokens)")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[f"<{name}>" for name in _ROLES],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((_LONG_WORD.sub(r"\1", plain(c[:LEARNED])) for c in captions), trainer)
        return _with_roles(backend, Roles(**{name: n for n, name in enumerate(_ROLES)}))  # type: ignore[arg-type]

    @property
    def vocab(self) -> int:
        """Number of ids including special ones: the smallest `TextConfig.vocab` for all tokens."""
        return max(self._backend.get_vocab_size(), 1 + max(self.roles.ids().values()))

    @property
    def plain_vocab(self) -> int:
        """Number of ids that captions can contain; published CLIP and SigLIP weights have rows only for these."""
        return self._backend.get_vocab_size()

    def check(self, caption: str, config: TextConfig) -> None:
        """Raises: BadSample for a caption that `encode` must not get (see `kiloword.stores.tokens`)."""

    def encode(self, captions: Sequence[str], config: TextConfig) -> Texts:
        """Pack T captions: start, tokens, end, pads if asked for, extra tokens; at most `config.context` ids each.

        A longer caption loses its last tokens, keeps its end, and is counted in `truncated` and by `naming_truncated`.
        Errors: ValueError when an id does not fit `config.vocab`, or nothing fits the context.
        """
        head, tail = ([self.roles.start] if self.roles.prefix else []), [self.roles.end]
        extra = [self.special(name) for name in config.extra_tokens]
        room, rows, truncated = self._room(config), list[list[int]](), 0
        for caption in captions:
            words = self._words(caption)
            if len(words) > room:
                note_truncated(caption, len(words), room)
                truncated += 1
            pads = [self.roles.pad] * (room - len(words)) if config.pad_to_context else []
            rows.append([*head, *words[:room], *tail, *pads, *extra])
        ids = np.array([one for row in rows for one in row], np.int64)
        if len(ids) and ids.max() >= config.vocab:
            raise ValueError(
                f"token id {ids.max()} does not fit a text tower with {config.vocab} embeddings; "
                "use the tokenizer the model was trained with, or set model.text.vocab to the tokenizer's"
            )
        lengths = [len(row) for row in rows]
        starts = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int64))
        return Texts(torch.from_numpy(ids), starts, max(lengths, default=0), truncated)

    def cut(self, captions: Sequence[str], config: TextConfig) -> dict[int, tuple[int, int]]:
        """Captions that `encode` cuts: position -> (tokens in total, tokens that remain), without special tokens.

        Errors: ValueError as of `encode`.
        """
        room = self._room(config)
        lengths = [len(self._words(caption)) for caption in captions]
        return {n: (length, room) for n, length in enumerate(lengths) if length > room}

    def _room(self, config: TextConfig) -> int:
        """Number of tokens that a caption may have besides the special ones. Errors: ValueError for none."""
        room = config.context - int(self.roles.prefix) - 1 - len(config.extra_tokens)
        if room < 1:
            raise ValueError(f"a context of {config.context} tokens leaves no room for words; ask for a longer one")
        return room

    def _encode(self, caption: str) -> array[int]:
        """Ids of a caption without special tokens."""
        cleaned = CLEANERS[self.clean](caption)
        with _library("the tokenizer cannot read captions: its tokenizer.json is damaged"):
            return array("i", self._backend.encode_batch_fast([cleaned], add_special_tokens=False)[0].ids)

    def special(self, name: str) -> int:
        """The id of "start", "end", "pad", "mask", "cls" or "unc"; ValueError for another name."""
        if name not in _ROLES:
            raise ValueError(f"no special token {name!r}; expected one of {', '.join(_ROLES)}")
        return self.roles.ids()[name]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids up to the first end token, without special tokens."""
        special = set(self.roles.ids().values())
        if self.clean == "clip":
            special.remove(self.roles.pad)  # CLIP pads with the id of "!", a word
        words = [i for i in takewhile(lambda i: i != self.roles.end, map(int, ids)) if i not in special]
        text = self._backend.decode(words, skip_special_tokens=True)
        return (text.replace("</w>", " ") if self.clean == "clip" else text).strip()

    def save(self, folder: str | Path) -> None:
        """Write `folder/tokenizer.json`; a reader sees the old file or the new one."""
        write_atomic(Path(folder) / "tokenizer.json", self.to_bytes())

    def to_bytes(self) -> bytes:
        """The bytes that `save` writes."""
        return self._backend.to_str(pretty=True).encode()

    @staticmethod
    def load(folder: str | Path) -> Tokenizer:
        """Read `folder/tokenizer.json`. Errors: ValueError when it is missing, damaged or not from kiloword."""
        return Tokenizer(read_document(Path(folder) / "tokenizer.json"))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        return Tokenizer, (self._backend.to_str(),)  # the library's pickle loses encode_special_tokens


def clip_tokenizer() -> Tokenizer:
    """CLIP's BPE, converted from the merges that open_clip ships: the ids of `open_clip.tokenize`, then mask, cls, unc.

    Needs the `openclip` extra once; a saved model folder does not. Captions with entities or beyond ascii need `ftfy`.
    Differs only where `regex` and the `tokenizers` library have different Unicode versions (new letters).
    """
    package = importlib.util.find_spec("open_clip")  # found, not imported: its import needs torchvision
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            needs("CLIP's vocabulary", "open_clip_torch", "openclip")
            + ", or to train, give its file by --tokenizer bpe_simple_vocab_16e6.txt.gz, or --tokenizer own"
        )
    return clip_tokenizer_from(
        read_merges(Path(package.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz")
    )


def clip_tokenizer_from(merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """CLIP's BPE with these merges, in order. Raises: ValueError for merges of unknown symbols."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes first, the others beyond 255
    names = symbols + [s + "</w>" for s in symbols] + [a + b for a, b in merges] + [_CLIP_START, _CLIP_END]
    ids = {name: i for i, name in enumerate(names)}
    with _library("the merges are not those of CLIP"):
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=list(merges), end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in (_CLIP_START, _CLIP_END)])
    n = len(names)
    return _with_roles(backend, Roles(start=n - 2, end=n - 1, pad=0, mask=n, cls=n + 1, unc=n + 2))


def siglip_tokenizer(path: str | Path) -> Tokenizer:
    """SigLIP's sentencepiece vocabulary from a `tokenizer.json` (as model hubs ship it) or a `.model` file.

    Canonicalises captions (lower case, no punctuation), has no start token, ends and pads with id 1.
    Errors: ValueError when the file is missing, or a `.model` is given without `transformers`.
    """
    path = Path(path)
    return tokenizer_from(read_document(path) if path.suffix == ".json" else _convert_sentencepiece(path))


def tokenizer_from(document: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`: kiloword's, one that kiloword exported, CLIP's or SigLIP's.

    Raises: ValueError for others.
    """
    backend, parsed = tokenizers.Tokenizer.from_str(document), json.loads(document)
    if "start" in ((parsed.get("post_processor") or {}).get("special_tokens") or {}):
        return Tokenizer(document)
    ids: dict[str, Any] = {name: backend.token_to_id(f"<{name}>") for name in _ROLES}
    if None not in ids.values():  # exports name them so
        return _with_roles(backend, Roles(**ids))
    model, n = parsed["model"], backend.get_vocab_size()
    if model["type"] == "Unigram":
        return _with_roles(backend, Roles(start=n + 3, end=1, pad=1, mask=n, cls=n + 1, unc=n + 2, prefix=False))
    if model.get("end_of_word_suffix") == "</w>":
        merges = [pair.split() if isinstance(pair, str) else pair for pair in model["merges"]]
        return clip_tokenizer_from([(first, second) for first, second in merges])
    raise ValueError(
        f"this tokenizer.json holds a {model['type']} model of another kind: expected CLIP's, SigLIP's (a "
        "sentencepiece unigram model) or one of kiloword."
    )


def _with_roles(backend: tokenizers.Tokenizer, roles: Roles) -> Tokenizer:
    backend.post_processor = roles.template()
    return Tokenizer(backend.to_str())


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The merges of CLIP in its own file, plain or gzipped. Raises: ValueError for another file."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            lines = file.read(LARGEST).decode().split("\n")[1 : _MERGES + 1]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as merges of CLIP ({error}).") from error
    pairs = [tuple(line.split()) for line in lines]
    if len(pairs) != _MERGES or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{path} does not hold the {_MERGES:,} merges of CLIP (bpe_simple_vocab_16e6.txt.gz).")
    return [(first, second) for first, second in pairs]


def _convert_sentencepiece(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"no sentencepiece model at {path}; give the path of SigLIP's tokenizer.json or .model file")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("sentencepiece") is None:
        raise ValueError(
            needs(path.name, "transformers and sentencepiece", "hf", " sentencepiece; ")
            + "or give the model's tokenizer.json, which needs neither"
        )
    from transformers import T5TokenizerFast  # type: ignore[import-not-found, unused-ignore]

    document: str = T5TokenizerFast(str(path), extra_ids=0, legacy=False).backend_tokenizer.to_str()
    return document


Clean = Literal["plain", "clip", "siglip", "encodable"]

PUNCTUATION = str.maketrans("", "", string.punctuation)


def encodable(caption: str) -> str:
    """Lone surrogates become question marks, as no encoder accepts them."""
    return caption if caption.isascii() else caption.encode("utf-8", "replace").decode()


def plain(caption: str) -> str:
    """One space between words; encodable."""
    return " ".join(encodable(caption).split())


def _web(caption: str) -> str:
    """Broken encodings and entities repaired as CLIP and SigLIP do (`ftfy`, then html twice)."""
    if caption.isascii() and caption.isprintable() and "&" not in caption:
        return " ".join(caption.split())  # ftfy and html would change nothing, and take ten times as long as encoding
    try:
        import ftfy
    except ImportError as error:
        raise ValueError(needs(f"caption {caption[:40]!r}, read as CLIP reads it,", "ftfy", "openclip")) from error
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


def clip(caption: str) -> str:
    """Repaired, one space between words, lower case (open_clip's "lower")."""
    return _web(caption).lower()


def siglip(caption: str) -> str:
    """Repaired, lower case, no ascii punctuation, underscores are spaces (open_clip's "canonicalize")."""
    return " ".join(_web(caption).replace("_", " ").translate(PUNCTUATION).lower().split())


CLEANERS: dict[Clean, Callable[[str], str]] = {"plain": plain, "clip": clip, "siglip": siglip, "encodable": encodable}
