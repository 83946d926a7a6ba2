"""Models of other libraries by name, wherever a model folder is expected.

`open_clip:NAME[@TAG]:FILE`, `hf:FOLDER` and `hf-hub:ORG/NAME[@REVISION]` become a model folder in the cache, once
for each version of their files. Only `hf-hub:` may reach a network: through huggingface_hub, which reads its cache
where it can, and only that with HF_HUB_OFFLINE=1. No code of a folder runs.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from kiloword.errors import needs
from kiloword.files import cache_folder
from kiloword.interop import folder, hf_clip
from kiloword.interop.checkpoint import read
from kiloword.interop.hf_folder import json_object, weight_files
from kiloword.interop.open_clip import assumed, import_state
from kiloword.methods.registry import MODELS
from kiloword.terminal import warn_once

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
FILES = ("*.json", "*.safetensors", "*.txt", "*.md", "*.model")  # of a hub: no pickles, no code
TRANSLATION = 3  # raise it when the same files become another model


def is_foreign(name: str) -> bool:
    """Whether a name begins with the name of another library."""
    return name.startswith(MODELS)


def split(name: str) -> tuple[str, Path | None]:
    """What stands in a name before its path, and the path; None where there is none, as in "hf-hub:ORG/NAME"."""
    if not is_foreign(name):
        return "", Path(name)
    kind, _, rest = name.partition(":")
    model, _, file = rest.partition(":")
    start, path = {"hf": ("hf:", rest), "open_clip": (f"open_clip:{model}:", file)}.get(kind, (name, ""))
    return start, Path(path).expanduser() if path else None


def absolute(name: str) -> str:
    """The name of the same model in every working directory; links in its path are followed."""
    start, path = split(name)
    return name if path is None else f"{start}{path.resolve()}"


def local_folder(name: str | Path) -> str | Path:
    """The model folder of a name: of another library's model that in the cache; any other name as it is.

    Raises: ValueError for a model that cannot be translated, and for files that are missing or damaged.
    """
    if isinstance(name, Path) or not is_foreign(name):
        return name
    kind, _, rest = name.partition(":")
    if kind == "hf-hub":
        return _of_folder(_fetched(rest))
    if kind == "hf":
        return _of_folder(Path(rest).expanduser())
    model, _, file = rest.partition(":")
    if not (model and file):
        raise ValueError(
            f"{name} has no file of weights: write open_clip:NAME:FILE, or open_clip:NAME@TAG:FILE for published ones."
        )
    return _of_open_clip(model, Path(file).expanduser())


def _of_open_clip(model: str, weights: Path) -> Path:
    place = _place(f"open_clip:{model}", [weights, *filter(Path.is_file, [Path(model)])])
    if not (place / "model.safetensors").is_file():  # written last
        imported = import_state(model, read(weights))
        folder.write(imported, weights, place, f"open_clip {Path(model).name}")
        warn_once(f"note: {assumed(model, imported.config)}")
    return place


def _of_folder(source: Path) -> Path:
    """A folder of kiloword as it is; one of transformers or, without weights of theirs, of open_clip, translated."""
    described = source / "open_clip_config.json"
    if described.is_file() and not (source / "model.safetensors").is_file():
        return _of_open_clip(str(described), source / "open_clip_model.safetensors")
    config = json_object(source / "config.json")
    if str(config.get("format", "")).startswith("kiloword-model"):
        return source
    place = _place(f"hf:{source}", [*sorted(source.glob("*.json")), *weight_files(source)])
    if not (place / "model.safetensors").is_file():  # written last
        imported, weights = hf_clip.import_folder(source)
        folder.write(imported, weights, place, f"transformers {config.get('model_type')}")
    return place


def _place(name: str, files: list[Path]) -> Path:
    """The place in the cache for a model whose files are as they are now. Raises: ValueError for a missing file."""
    key = hashlib.blake2b(f"{TRANSLATION} {name}".encode(), digest_size=12)
    for file in files:
        if not file.is_file():
            raise ValueError(f"no file of weights at {file}: check the path; nothing is downloaded.")
        stat = file.stat()
        key.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return cache_folder() / "models" / key.hexdigest()


def _fetched(name: str) -> Path:
    """The folder of a repository in huggingface_hub's cache, fetched where it is not there yet."""
    if not REPOSITORY.fullmatch(name):
        raise ValueError(f"hf-hub:{name[:100]} is no repository: expected hf-hub:ORG/NAME or hf-hub:ORG/NAME@REVISION.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(needs(f"hf-hub:{name}", "huggingface_hub", "remote")) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES)))
    except Exception as error:  # its errors, those of the connection, and of a cache that lacks it
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"hf-hub:{name} is neither in the cache of huggingface_hub nor can it be fetched ({reason}): check "
            "its name and the connection, or give a downloaded folder as hf:FOLDER."
        ) from None
