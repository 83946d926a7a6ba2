"""`kiloword push`: a model folder or an export on a hub, by huggingface_hub, with its card.

Nothing else of kiloword uploads anything. A run's state, data and features stay. All files go in one commit, so that no
reader of the hub finds weights beside an older config.
"""

from __future__ import annotations

import re
from pathlib import Path

from kiloword.addresses import scrubbed
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.errors import needs
from kiloword.models.card import CARD, model_card
from kiloword.models.model_folder import WEIGHTS, check_weights, model_files, read_model_file
from kiloword.models.tensors import open_tensors
from kiloword.models.trust import method_of
from kiloword.terminal import say

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
MODEL = ("config.json", "tokenizer.json", WEIGHTS)
LISTED = re.compile(r"^- `(.+)`$", re.MULTILINE)  # a file of an export, in its card; no other file goes to a hub
LOADED = re.compile(r'(kiloword\.load\("|"local-dir:|from_pretrained\("|SentenceTransformer\(")FOLDER')  # in a card
HUB = {'kiloword.load("': 'kiloword.load("hf-hub:', '"local-dir:': '"hf-hub:'}


def files_of(path: Path) -> tuple[Path, list[str]]:
    """The folder of a model, of a run's model or of an export, and the names of its files that go to a hub.

    Raises: ValueError for any other folder, and for a model that `kiloword.load` would not open.
    """
    found = model_files(path)[0].parent
    folder = found if all((found / name).is_file() for name in MODEL) else path
    if '"kiloword-model' in _text(folder / "config.json"):
        file = read_model_file(folder)
        if ":" not in file.method:  # of the user's own module, which nobody asked to import
            check_weights(folder, file, method_of(file, folder), open_tensors(folder / WEIGHTS))
        Tokenizer.load(folder)
        return folder, list(MODEL)
    if listed := LISTED.findall(_text(folder / CARD)):
        files, root = {name: folder / name for name in listed}, folder.resolve()  # which a link may lead out of
        return folder, [n for n, file in files.items() if file.is_file() and file.resolve().is_relative_to(root)]
    raise ValueError(
        f"{folder} is no model folder ({', '.join(MODEL)}), such as OUT/model of a run, nor a folder that kiloword "
        "export wrote."
    )


def _text(path: Path) -> str:
    """The text of a file, "" where there is none."""
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def run(model: str, repository: str, private: bool = False, message: str = "") -> None:
    """Upload a model.

    Args: repository: ORG/NAME, created where it is missing; private: for a new one, and required of an old one.
    Raises: ValueError for what is no model, a repository of another name or visibility, a missing token, and a hub
    that does not answer or refuses.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository[:100]} is no repository: expected ORG/NAME.")
    folder, names = files_of(Path(model))
    is_model = names == list(MODEL)
    say(
        *(f"{name}  {(folder / name).stat().st_size:,} bytes" for name in names), f"{CARD}, which loads it from the hub"
    )
    try:
        import huggingface_hub as hub
    except ImportError:
        raise ValueError(needs("push", "huggingface_hub", "remote")) from None
    if not hub.get_token():
        raise ValueError("huggingface_hub finds no token: log in by `hf auth login`, or set HF_TOKEN.")
    api = hub.HfApi()
    card = _text(folder / CARD) or model_card(folder)
    card = LOADED.sub(lambda found: HUB.get(found[1], found[1]) + repository, card)  # code that loads it from the hub
    contents = {CARD: card.encode()} | {name: folder / name for name in names}
    operations = [hub.CommitOperationAdd(path_in_repo=n, path_or_fileobj=c) for n, c in contents.items()]
    message = message or f"Upload {'model' if is_model else 'export'}"
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ValueError("it exists and is public: omit --private, or make it private.")
        address = api.create_commit(repository, operations, commit_message=message).commit_url
    except Exception as error:  # of the hub, of whichever HTTP library serves it, of the connection
        reason = scrubbed(" ".join(str(error).split()))[:300] or type(error).__name__
        raise ValueError(f"{api.endpoint} did not take the upload to {repository}: {reason}") from None
    say(f"pushed: {address}", *([f'load it: kiloword.load("hf-hub:{repository}")'] if is_model else []))
