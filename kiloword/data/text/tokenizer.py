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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from kiloword.config.recipes import TextConfig
from kiloword.data.text.tokenizer_file import CLIP_END, CLIP_START, CLIP_WORDS, Roles, read
from kiloword.errors import needs, note_truncated
from kiloword.files import write_atomic
from kiloword.types import Texts

LEARNED = 1 << 16  # characters of a caption that train a vocabulary; of a word, those before the end of _LONG_WORD
_LONG_WORD = re.compile(r"(\S{1024})\S+")
REMEMBERED = 1 << 15  # captions whose ids are cached, about 1 kB each
REMEMBERED_TOKENS = 128  # longest caption in the cache
CLIP_MERGES = 49152 - 256 - 2


class Tokenizer:
    """Captions to packed ids, ids to text; self-contained in one `tokenizer.json` of the `tokenizers` library.

    Our vocabularies lower-case and normalise white space; CLIP's and SigLIP's clean text as open_clip does.
    """

    def __init__(self, document: str) -> None:
        # Set before the library starts threads: after them, forking loader workers would warn and could hang.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._backend = tokenizers.Tokenizer.from_str(document)
        parsed = json.loads(document)
        self._backend.no_padding()
        self._backend.no_truncation()
        self.roles = Roles.read(parsed, self._backend.get_vocab_size())
        self.clean: Clean = "encodable" if self.roles.verbatim else _clean_of(parsed["model"])
        # "<mask>" in a caption is text; only CLIP's pattern finds its two markers in captions.
        self._backend.encode_special_tokens = self.clean != "clip"
        self._cached: dict[str, list[int]] = {}
        self._cleaner: Callable[[str], str] = CLEANERS[self.clean]

    @staticmethod
    def train(captions: Iterable[str], vocab: int) -> Tokenizer:
        """A byte-level BPE of at most `vocab` ids; the same captions in any order give the same bytes.

        Only the first 1,024 characters of a word and 65,536 of a caption are used, as the time is quadratic in them.
        Errors: ValueError when `vocab` is too small for the 256 bytes and six special tokens.
        """
        names = ["<start>", "<end>", "<pad>", "<mask>", "<cls>", "<unc>"]
        if vocab < 256 + len(names):
            raise ValueError(f"tokenizer vocabulary is {vocab}: expected at least 262 (bytes and special tokens)")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=names,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(map(_learned, captions), trainer)
        start, end, pad, mask, cls, unc = range(len(names))
        return _with_roles(backend, Roles(start=start, end=end, pad=pad, mask=mask, cls=cls, unc=unc))

    @property
    def vocab(self) -> int:
        """Number of ids including special ones: the smallest `TextConfig.vocab` for all tokens."""
        return max(self._backend.get_vocab_size(), 1 + max(self.roles.ids().values()))

    @property
    def plain_vocab(self) -> int:
        """Number of ids that captions can contain; published CLIP and SigLIP weights have rows only for these."""
        return self._backend.get_vocab_size()

    def encode(self, captions: Sequence[str], config: TextConfig) -> Texts:
        """Pack T captions: start, tokens, end, pads if asked for, extra tokens; at most `config.context` ids each.

        A longer caption loses its last tokens, keeps its end, and is counted in `truncated` and by `naming_truncated`.
        Errors: ValueError when an id does not fit `config.vocab`, or nothing fits the context.
        """
        head, tail = ([self.roles.start] if self.roles.prefix else []), [self.roles.end]
        extra = [self.special(name) for name in config.extra_tokens]
        room = self._room(config)
        flat: list[int] = []
        lengths = []
        truncated = 0
        for text, words in zip(captions, self._words(captions), strict=True):
            if len(words) > room:
                note_truncated(text, len(words), room)
                words = words[:room]
                truncated += 1
            pads = [self.roles.pad] * (room - len(words)) if config.pad_to_context else []
            caption = head + words + tail + pads + extra
            lengths.append(len(caption))
            flat += caption
        return _pack(flat, lengths, truncated, config.vocab)

    def cut(self, captions: Sequence[str], config: TextConfig) -> dict[int, tuple[int, int]]:
        """Captions that `encode` cuts: position -> (tokens in total, tokens that remain), without special tokens.

        Errors: ValueError as of `encode`.
        """
        room = self._room(config)
        return {n: (len(words), room) for n, words in enumerate(self._words(captions)) if len(words) > room}

    def _room(self, config: TextConfig) -> int:
        """Number of tokens that a caption may have besides the special ones. Errors: ValueError for none."""
        room = config.context - int(self.roles.prefix) - 1 - len(config.extra_tokens)
        if room < 1:
            raise ValueError(f"a context of {config.context} tokens leaves no room for words; ask for a longer one")
        return room

    def _words(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids of every caption, without special tokens; cached, as captions of small data sets recur."""
        fresh = [c for c in dict.fromkeys(captions) if c not in self._cached]
        try:
            encoded = self._backend.encode_batch_fast([self._cleaner(c) for c in fresh], add_special_tokens=False)
        except BaseException as error:  # a plain Exception if a model has no token for an unknown letter; or a panic
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the tokenizer cannot read captions ({error}): its tokenizer.json is damaged.") from error
        new = {c: e.ids for c, e in zip(fresh, encoded, strict=True)}
        words = [new[c] if c in new else self._cached[c] for c in captions]
        if len(self._cached) > REMEMBERED:
            self._cached.clear()
        self._cached.update((c, ids) for c, ids in new.items() if len(ids) <= REMEMBERED_TOKENS)
        return words

    def special(self, name: str) -> int:
        """The id of "start", "end", "pad", "mask", "cls" or "unc"; ValueError for another name."""
        ids = self.roles.ids()
        if name not in ids:
            raise ValueError(f"no special token {name!r}; expected one of {', '.join(ids)}")
        return ids[name]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids up to the first end token, without special tokens."""
        special = set(self.roles.ids().values())
        if self.clean == "clip":
            special.remove(self.roles.pad)  # CLIP pads with the id of "!", a word
        words: list[int] = []
        for i in map(int, ids):
            if i == self.roles.end:
                break
            if i not in special:
                words.append(i)
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
        return Tokenizer(read(Path(folder) / "tokenizer.json"))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[str]]:
        return Tokenizer, (self._backend.to_str(),)  # the library's pickle loses encode_special_tokens


def clip_tokenizer() -> Tokenizer:
    """CLIP's BPE, converted from the merges that open_clip ships: the ids of `open_clip.tokenize`, then mask, cls, unc.

    Needs the `openclip` extra once; a saved model folder does not. Captions with entities or beyond ascii need `ftfy`.
    Differs only where `regex` and the `tokenizers` library have different Unicode versions (new letters).
    """
    return clip_tokenizer_from(_clip_merges())


def clip_tokenizer_from(merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """CLIP's BPE with these merges, in order. Raises: ValueError for merges of unknown symbols."""
    symbols = _byte_symbols()
    names = symbols + [s + "</w>" for s in symbols] + [a + b for a, b in merges] + [CLIP_START, CLIP_END]
    ids = {name: i for i, name in enumerate(names)}
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=list(merges), end_of_word_suffix="</w>"))
    except Exception as error:  # the library raises no other
        raise ValueError(f"the merges are not those of CLIP: {error}.") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in (CLIP_START, CLIP_END)])
    n = len(names)
    return _with_roles(backend, Roles(start=n - 2, end=n - 1, pad=0, mask=n, cls=n + 1, unc=n + 2))


def siglip_tokenizer(path: str | Path) -> Tokenizer:
    """SigLIP's sentencepiece vocabulary from a `tokenizer.json` (as model hubs ship it) or a `.model` file.

    Canonicalises captions (lower case, no punctuation), has no start token, ends and pads with id 1.
    Errors: ValueError when the file is missing, or a `.model` is given without `transformers`.
    """
    path = Path(path)
    if path.suffix != ".json":
        return siglip_tokenizer_from(_convert_sentencepiece(path))
    return siglip_tokenizer_from(read(path))


def exported_tokenizer_from(document: str) -> Tokenizer | None:
    """A vocabulary of kiloword from the tokenizer.json of an export, which names its special tokens; else None."""
    backend = tokenizers.Tokenizer.from_str(document)
    ids = {name: backend.token_to_id(f"<{name}>") for name in ("start", "end", "pad", "mask", "cls", "unc")}
    known: dict[str, Any] = {name: value for name, value in ids.items() if value is not None}
    return _with_roles(backend, Roles(**known)) if len(known) == len(ids) else None


def siglip_tokenizer_from(document: str) -> Tokenizer:
    """SigLIP's vocabulary from the text of a `tokenizer.json`; ValueError when it holds no unigram model."""
    parsed = json.loads(document)
    if parsed.get("model", {}).get("type") != "Unigram":
        raise ValueError(
            "this tokenizer.json holds neither SigLIP's kind of vocabulary (a sentencepiece unigram model) nor one of "
            "kiloword."
        )
    backend = tokenizers.Tokenizer.from_str(document)
    backend.no_truncation()
    backend.no_padding()
    n = backend.get_vocab_size()
    return _with_roles(backend, Roles(start=n + 3, end=1, pad=1, mask=n, cls=n + 1, unc=n + 2, prefix=False))


def _learned(caption: str) -> str:
    """The part of a caption that trains a vocabulary: all of it unless it is very long."""
    return _LONG_WORD.sub(r"\1", plain(caption[:LEARNED]))


def _with_roles(backend: tokenizers.Tokenizer, roles: Roles) -> Tokenizer:
    backend.post_processor = roles.template()
    return Tokenizer(backend.to_str())


def _clean_of(model: dict[str, Any]) -> Clean:
    """The cleaning that belongs to the kind of model. Errors: ValueError for a kind that kiloword does not write."""
    kind = model.get("type")
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"this tokenizer.json holds a model of type {kind!r}; expected BPE or Unigram.")
    if kind == "Unigram":
        return "siglip"
    return "clip" if model.get("end_of_word_suffix") == "</w>" else "plain"


def _pack(flat: list[int], lengths: list[int], truncated: int, vocab: int) -> Texts:
    ids = np.array(flat, dtype=np.int64)
    if len(ids) and ids.max() >= vocab:
        raise ValueError(
            f"token id {ids.max()} does not fit a text tower with {vocab} embeddings; "
            "use the tokenizer the model was trained with, or set model.text.vocab to the tokenizer's"
        )
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return Texts(torch.from_numpy(ids), torch.from_numpy(starts), max(lengths, default=0), truncated)


def _byte_symbols() -> list[str]:
    """The 256 characters that stand for bytes, in CLIP's order: printable ones first, then shifted beyond 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = len(set(range(256)) - set(printable))
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(shifted)]


def _clip_merges() -> list[tuple[str, str]]:
    package = importlib.util.find_spec("open_clip")  # found, not imported: its import needs torchvision
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            needs("CLIP's vocabulary", "open_clip_torch", "openclip")
            + ", or to train, give its file by --tokenizer bpe_simple_vocab_16e6.txt.gz, or --tokenizer own"
        )
    path = Path(package.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")[1 : CLIP_MERGES + 1]
    pairs = [line.split() for line in lines]
    return [(a, b) for a, b in pairs]


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
