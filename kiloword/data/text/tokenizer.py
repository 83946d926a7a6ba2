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

import tokenizers
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
    """The special ids. A tokenizer.json has them as the special tokens of its template, by name."""

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
        document = path.read_text("utf-8")
        tokenizers.Tokenizer.from_str(document)
    return document


class Tokenizer:
    """Captions to packed ids, ids to text; self-contained in one `tokenizer.json` of the `tokenizers` library.

    Our vocabularies lower-case and normalise white space; CLIP's and SigLIP's clean text as open_clip does.
    """

    def __init__(self, backend: tokenizers.Tokenizer, roles: Roles) -> None:
        self._backend, self.roles = backend, roles
        backend.no_padding()
        backend.no_truncation()
        ids = {**roles.ids(), **({_VERBATIM: roles.end} if roles.verbatim else {})}
        backend.post_processor = processors.TemplateProcessing(
            single="start $A end" if roles.prefix else "$A end",
            special_tokens=[{"id": name, "ids": [value], "tokens": [f"<{name}>"]} for name, value in ids.items()],
        )
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # the same caption would get other tokens each time
        bpe: Clean = "clip" if getattr(backend.model, "end_of_word_suffix", None) == "</w>" else "plain"
        siglip = isinstance(backend.model, models.Unigram) or getattr(backend.model, "byte_fallback", False)
        self.clean = "encodable" if roles.verbatim else "siglip" if siglip else bpe
        # "<mask>" in a caption is text; only CLIP's pattern finds its two markers in captions.
        backend.encode_special_tokens = self.clean != "clip"
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
        return Tokenizer(backend, Roles(start=0, end=1, pad=2, mask=3, cls=4, unc=5))

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
        truncated = self.cut(captions, config)
        for place, (length, room) in truncated.items():
            note_truncated(captions[place], length, room)
        room, head = self._room(config), [self.roles.start] * self.roles.prefix
        pad, special = [self.roles.pad] * config.pad_to_context, self.roles.ids()
        extra = [special[name] for name in config.extra_tokens]
        words = [self._words(caption) for caption in captions]
        rows = [[*head, *ids[:room], self.roles.end, *pad * (room - len(ids)), *extra] for ids in words]
        texts = Texts.pack(rows, len(truncated))
        if len(texts.ids) and texts.ids.max() >= config.vocab:
            raise ValueError(
                f"token id {texts.ids.max()} does not fit a text tower with {config.vocab} embeddings; "
                "use the tokenizer the model was trained with, or set model.text.vocab to the tokenizer's"
            )
        return texts

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
        return tokenizer_from(read_document(Path(folder) / "tokenizer.json"))

    def __reduce__(self) -> tuple[Callable[[str], Tokenizer], tuple[str]]:
        return tokenizer_from, (self._backend.to_str(),)  # the library's pickle loses encode_special_tokens


def clip_tokenizer(path: Path | None = None) -> Tokenizer:
    """CLIP's BPE by the merges in a file, or in open_clip's own: the ids of `open_clip.tokenize`, then mask, cls, unc.

    Needs the `openclip` extra once; a saved model folder does not. Captions with entities or beyond ascii need `ftfy`.
    Differs only where `regex` and the `tokenizers` library have different Unicode versions (new letters).
    Raises: ValueError for another file.
    """
    if path is None:
        package = importlib.util.find_spec("open_clip")  # found, not imported: its import needs torchvision
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                needs("CLIP's vocabulary", "open_clip_torch", "openclip")
                + ", or to train, give its file by --tokenizer bpe_simple_vocab_16e6.txt.gz, or --tokenizer own"
            )
        path = Path(package.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            lines = file.read(LARGEST).decode().split("\n")[1 : _MERGES + 1]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as merges of CLIP ({error}).") from error
    pairs = [tuple(line.split()) for line in lines]
    if len(pairs) != _MERGES or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{path} does not hold the {_MERGES:,} merges of CLIP (bpe_simple_vocab_16e6.txt.gz).")
    return clip_tokenizer_from([(first, second) for first, second in pairs])


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
    return Tokenizer(backend, Roles(start=n - 2, end=n - 1, pad=0, mask=n, cls=n + 1, unc=n + 2))


def tokenizer_from(document: str, lower: bool = False) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`: kiloword's, one that kiloword exported, CLIP's, SigLIP's or SigLIP 2's.

    SigLIP's canonicalises captions (lower case, no punctuation), has no start token, ends and pads with id 1. SigLIP
    2's is Gemma's; open_clip canonicalises its captions too.

    Args: lower: captions of SigLIP 2 are lower-cased alone, as by transformers. Raises: ValueError for others.
    """
    backend, parsed = tokenizers.Tokenizer.from_str(document), json.loads(document)
    template, model, n = parsed.get("post_processor") or {}, parsed["model"], backend.get_vocab_size()
    stored = {name: one for name, entry in (template.get("special_tokens") or {}).items() for one in entry["ids"][:1]}
    names: dict[str, Any] = {name: stored.get(name, backend.token_to_id(f"<{name}>")) for name in _ROLES}
    if None not in names.values() and all(value < n + 16 for value in names.values()):  # at most 16 follow the words
        prefix = "start" not in stored or "SpecialToken" in (template["single"] or [""])[0]
        return Tokenizer(backend, Roles(**names, prefix=prefix, verbatim=_VERBATIM in stored))
    if model.get("type") == "Unigram":
        return Tokenizer(backend, Roles(start=n + 3, end=1, pad=1, mask=n, cls=n + 1, unc=n + 2, prefix=False))
    end, pad = map(backend.token_to_id, ("<eos>", "<pad>"))
    if model.get("byte_fallback") and end is not None and pad is not None:
        if lower:
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
        ids = {"start": n + 3, "end": end, "pad": pad, "mask": n, "cls": n + 1, "unc": n + 2}
        return Tokenizer(backend, Roles(**ids, prefix=False, verbatim=lower))
    if model.get("end_of_word_suffix") == "</w>":
        merges = [pair.split() if isinstance(pair, str) else pair for pair in model["merges"]]
        return clip_tokenizer_from([(first, second) for first, second in merges])
    raise ValueError(
        f"this tokenizer.json holds a {model.get('type', 'nameless')} model of another kind: expected one of kiloword, "
        "whose special ids follow its words, CLIP's, SigLIP's (a sentencepiece unigram model) or SigLIP 2's (Gemma's)."
    )


_EXPECTED = (
    "a tokenizer.json (kiloword's, CLIP's or SigLIP's), a model folder, or CLIP's merges (bpe_simple_vocab_16e6.txt.gz)"
)


def vocabulary(name: str) -> Tokenizer:
    """The tokenizer named "clip" or "siglip", or the one in a file or model folder.

    CLIP's comes with open_clip; SigLIP's with no package: it is looked for among downloads of huggingface_hub.
    Raises: ValueError for files that are missing, damaged or of another kind, saying what to install or to give.
    """
    if name == "clip":
        return clip_tokenizer()
    path = _downloaded_siglip() if name == "siglip" else Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--tokenizer {name} is no file: expected own, clip, siglip, or {_EXPECTED}.")
    return clip_tokenizer(path) if path.suffix in (".gz", ".txt") else tokenizer_from(read_document(path))


def encoder_tokenizer(
    document: str, rows: int, pad: int | None = None, lower: bool = False, ends: bool = True
) -> Tokenizer:
    """The tokenizer of another library's text encoder: captions get the ids that this library gives them.

    Its first and last special token are start and end; class and uncertainty token follow its vocabulary, as does the
    mask token where it has none. Padding and truncation are removed.

    Args: document: the text of a tokenizer.json; rows: of the encoder's table; pad:
    id of its pads; lower: captions are lower-cased first; ends: False puts a pad in place of the end.
    Raises: ValueError for a tokenizer without an end token, or with ids that the table has no rows for.
    """
    backend = tokenizers.Tokenizer.from_str(document)
    backend.no_padding()
    backend.no_truncation()
    words, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = next((n for n in (0, 1) if whole[n : n + len(words)] == words), None)
    if before is None or len(whole) - before - len(words) != 1:
        raise ValueError(
            f"the tokenizer puts the ids {whole[:20]} around {words[:20]}: expected one special token after a text, "
            "and at most one before"
        )
    highest = max(backend.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ValueError(f"the tokenizer has ids up to {highest:,}, but the encoder has {rows:,} rows for them")
    if lower:
        parts = [normalizers.Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = normalizers.Sequence(parts)
    end, found = whole[-1], backend.token_to_id
    mask = next((i for i in map(found, ("[MASK]", "<mask>")) if i is not None), highest + 3)
    own_pad = next((i for i in map(found, ("[PAD]", "<pad>")) if i is not None), end)
    pad, start = own_pad if pad is None else pad, whole[0] if before else end
    end = end if ends else pad
    special = {"start": start, "end": end, "pad": pad, "mask": mask, "cls": highest + 1, "unc": highest + 2}
    return Tokenizer(backend, Roles(**special, prefix=bool(before), verbatim=True))


def _downloaded_siglip() -> Path:
    """SigLIP's vocabulary of English among the downloads of huggingface_hub. Raises: ValueError where it is not."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    for kind in ("models--timm--ViT-*-SigLIP*", "models--google--siglip-*"):
        for path in sorted(folder.glob(f"{kind}/snapshots/*/tokenizer.json")):
            if not any(word in path.parts[-4] for word in ("SigLIP2", "siglip2", "i18n")):
                return path
    raise ValueError(
        f"--tokenizer siglip: no package brings SigLIP's vocabulary, and {folder} has none: give the path of its "
        "tokenizer.json, as published with the weights (timm/ViT-B-16-SigLIP)."
    )


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
