"""`kiloword push`: a model folder or an export on a hub, by huggingface_hub, with its card.

Nothing else of kiloword uploads anything. Only files that are named here go: none of a run's state, data or features.
All go in one commit, so that no reader of the hub finds weights beside an older config.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiloword.addresses import scrubbed
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.errors import needs
from kiloword.interop.hf_folder import json_object
from kiloword.interop.names import is_foreign
from kiloword.models.card import CARD, model_card
from kiloword.models.model_folder import WEIGHTS, check_weights, model_files, read_model_file
from kiloword.models.tensors import open_tensors
from kiloword.models.trust import method_of
from kiloword.terminal import say

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
HTTP = ("httpx", "httpx2", "requests", "urllib3")
TIMEOUT = 30  # seconds for the first answer of the hub
MODEL = ("config.json", "tokenizer.json", WEIGHTS)
WORDS = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json", "config.json")
EXPORTS = {  # target of `kiloword export` -> (files that every export has, files that some have)
    "sentence-transformers": (
        ("modules.json", WEIGHTS),
        ("config_sentence_transformers.json", "sentence_bert_config.json", "1_Normalize/config.json"),
    ),
    "open_clip": (("open_clip_config.json", "open_clip_model.safetensors"), ()),
    "onnx": (("image.onnx", "text.onnx"), ("image.onnx.data", "text.onnx.data")),
    "torch": (("image.pt2", "text.pt2"), ()),
    "safetensors": (("weights.safetensors",), ()),
    "transformers": (("config.json", "preprocessor_config.json", WEIGHTS), ()),
}
ON_HUB = {  # how a card names the folder -> how it names the repository
    'kiloword.load("FOLDER': 'kiloword.load("hf-hub:{}',
    '"local-dir:FOLDER': '"hf-hub:{}',
    'from_pretrained("FOLDER': 'from_pretrained("{}',
    'SentenceTransformer("FOLDER': 'SentenceTransformer("{}',
}
LOGIN = (
    "huggingface_hub finds no token: log in by `hf auth login`, or set HF_TOKEN to a token that may write "
    "(https://huggingface.co/settings/tokens). Nothing was uploaded."
)


@dataclass(frozen=True)
class Upload:
    """What goes to a hub: names in the repository -> the file, or the bytes of a card."""

    target: str
    folder: Path
    files: dict[str, Path | bytes]

    @property
    def what(self) -> str:
        """In words."""
        return "model" if self.target == "kiloword" else f"export to {self.target}"

    def lines(self) -> list[str]:
        """What goes and what stays, for the user."""
        sizes = {name: len(x) if isinstance(x, bytes) else x.stat().st_size for name, x in self.files.items()}
        left = sorted(path.name for path in self.folder.iterdir() if path.name not in {n.split("/")[0] for n in sizes})
        rest = [f"not uploaded: {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}"] if left else []
        total = f"{self.what} {self.folder}: {len(sizes)} files, {sum(sizes.values()):,} bytes"
        return [total, *(f"  {name}  {size:,}" for name, size in sizes.items()), *rest]


def upload_of(path: Path, repository: str) -> Upload:
    """The files of a model folder, of a run's model, or of an export. Raises: ValueError for any other folder."""
    run = "state" not in (path.name, path.parent.name)
    folder = model_files(path)[0].parent if run else path
    if _is_model(folder):
        return _of_model(folder, repository)
    for target, (needed, others) in EXPORTS.items():
        if all((folder / name).is_file() for name in (*needed, CARD)):
            names = [name for name in dict.fromkeys((*needed, *others, *WORDS)) if (folder / name).is_file()]
            return Upload(target, folder, _card(folder, repository) | {name: folder / name for name in names})
    present = sorted(p.name for p in folder.iterdir())[:6] if folder.is_dir() else None
    came = "is no folder" if present is None else f"holds {', '.join(present) or 'nothing'}"
    raise ValueError(
        f"{folder} {came}: expected a model folder ({', '.join(MODEL)}), such as OUT/model of a run, or a folder that "
        "kiloword export wrote."
    )


def _is_model(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in MODEL):
        return False
    return str(json_object(folder / "config.json").get("format", "")).startswith("kiloword-model")


def _of_model(folder: Path, repository: str) -> Upload:
    """A model folder that `kiloword.load` opens; a card is made where it has none. Raises: ValueError if damaged."""
    file = read_model_file(folder)
    weights = open_tensors(folder / WEIGHTS)
    if ":" not in file.method:  # of the user's own module, which nobody asked to import
        check_weights(folder, file, method_of(file, folder), weights)
    Tokenizer.load(folder)
    return Upload("kiloword", folder, _card(folder, repository) | {name: folder / name for name in MODEL})


def _card(folder: Path, repository: str) -> dict[str, Path | bytes]:
    """README.md, whose code loads the model from the hub; it is made where a model has none."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else model_card(folder)
    for local, remote in ON_HUB.items():
        text = text.replace(local, remote.format(repository))
    return {CARD: text.encode()}


def run(model: str, repository: str, private: bool = False, message: str = "") -> None:
    """Upload a model.

    Args: repository: ORG/NAME, created where it is missing; private: for a new one, and required of an old one.
    Raises: ValueError for what is no model, a repository of another name or visibility, a missing token, and a hub
    that does not answer or refuses.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(
            f"{repository[:100]} is no repository: expected ORG/NAME, ORG being your name or organisation."
        )
    if is_foreign(model):
        raise ValueError(f"{model[:100]} is a name: expected a folder, of a model or written by kiloword export.")
    upload = upload_of(Path(model), repository)
    say(*upload.lines())
    hub = _imported()
    if not (token := hub.get_token()):
        raise ValueError(LOGIN)
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    api = hub.HfApi(token=token)
    try:
        is_public = _made(hub, api, repository, private)
        address = "" if private and is_public else _committed(hub, api, repository, upload, message)
    except Exception as error:
        if not _is_expected(error := _cause(error)):
            raise
        raise ValueError(_reason(error, api.endpoint, repository)) from None
    if private and is_public:
        raise ValueError(
            f"{repository} exists and is public: nothing was uploaded. Omit --private, or make it private."
        )
    say(f"pushed: {address}")
    if upload.target == "kiloword":
        say(f'load it: kiloword.load("hf-hub:{repository}")')


ODD = AttributeError | TypeError | LookupError  # raised by huggingface_hub for an answer of another kind


def _imported() -> Any:
    try:
        import huggingface_hub.utils
    except ImportError:
        raise ValueError(needs("push", "huggingface_hub", "remote")) from None
    return huggingface_hub


def _made(hub: Any, api: Any, repository: str, private: bool) -> bool:
    """Create a repository where it is missing. Returns: whether it was there, and is public."""
    try:
        return not api.model_info(repository, timeout=TIMEOUT).private
    except hub.utils.RepositoryNotFoundError:
        api.create_repo(repository, private=private or None, exist_ok=True)
        return False


def _committed(hub: Any, api: Any, repository: str, upload: Upload, message: str) -> str:
    """One commit of all files. Returns: its address."""
    operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in upload.files.items()
    ]
    commit = api.create_commit(repository, operations, commit_message=message or f"Upload {upload.what}")
    return str(commit.commit_url)


def _cause(error: Exception) -> Exception:
    """What lies below "Error while uploading FILE"."""
    inner = error.__cause__
    return inner if isinstance(error, RuntimeError) and isinstance(inner, Exception) else error


def _is_expected(error: Exception) -> bool:
    """Whether an error is the hub's, the user's, or of the connection, in whichever HTTP library serves it."""
    expected = isinstance(error, OSError | ValueError | RuntimeError | ODD)
    return expected or type(error).__module__.partition(".")[0] in HTTP


def _reason(error: Exception, endpoint: str, repository: str) -> str:
    """One message for what a hub, or the way to it, refused."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{endpoint} does not accept this token: log in again by `hf auth login`, or renew HF_TOKEN."
    if status == 403:
        return f"this token may not write to {repository}: it needs the right to write, there or in its organisation."
    detail = scrubbed(" ".join(str(error).split()))[:300] or type(error).__name__
    if isinstance(error, ODD):
        return f"{endpoint} answers what huggingface_hub does not understand ({detail}): is HF_ENDPOINT a hub?"
    if status is not None or isinstance(error, ValueError | RuntimeError):
        return f"{endpoint} refuses the upload to {repository}: {detail}"
    return (
        f"{endpoint} cannot be reached ({detail}): check the connection, HF_ENDPOINT and HF_HUB_OFFLINE; run it again."
    )
