"""`kiloword push`: which files a hub gets, in which commit; what is pushed is what `load` reads back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kiloword
from commands import refused
from folders import model_folder
from kiloword.cli.main import main

SAID = "POST https://u:hf_secret@hub/api failed: 403"


class Hub:
    """What push asks huggingface_hub's HfApi for, for one repository, me/model."""

    endpoint = "https://hub"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None  # None: there is no repository yet
        self.commits: list[str] = []
        self.refuse = False
        self.asked = 0

    def create_repo(self, repository: str, private: bool, exist_ok: bool) -> None:
        self.asked += 1
        assert (repository, exist_ok) == ("me/model", True)
        self.private = private if self.private is None else self.private

    def model_info(self, repository: str) -> Any:
        return SimpleNamespace(private=self.private)

    def create_commit(self, repository: str, operations: list[Any], commit_message: str) -> Any:
        if self.refuse:
            raise OSError(SAID)
        self.commits.append(commit_message)
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()
        return SimpleNamespace(commit_url=f"{self.endpoint}/{repository}/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    library = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    server = Hub()
    monkeypatch.setattr(library, "HfApi", lambda: server)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return server


def test_a_run_goes_to_a_hub_and_comes_back(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "run" / "model")
    for private in ("state/step-1.json", "metrics.jsonl", "model/features.parquet", "model/notes.txt"):
        (tmp_path / "run" / private).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / private).write_text("mine")
    main(["push", str(tmp_path / "run"), "me/model", "--private", "--message", "First"])
    assert "model.safetensors" in capsys.readouterr().out
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert (hub.commits, hub.private) == (["First"], True)
    assert 'kiloword.load("hf-hub:me/model")' in hub.files["README.md"].decode()
    assert not (folder / "README.md").exists()
    (tmp_path / "back").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "back" / name).write_bytes(content)
    back = kiloword.load(tmp_path / "back")
    assert torch.equal(back.encode_text("a dog")["vec"], kiloword.load(folder).encode_text("a dog")["vec"])


def test_an_export_goes_with_its_own_files(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", "safetensors", str(model_folder(tmp_path / "m")), "--out", str(tmp_path / "out")])
    private = ["data.tar", "secret.json", "old.safetensors", ".cache/x/y.json", "notes/config.json"]
    for name in private:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    assert "truncated" not in capsys.readouterr().err
    for name in ("link.json", "processor_config.json"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "m" / "config.json")
    main(["push", str(tmp_path / "out"), "me/model"])
    words = {"README.md", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"}
    assert set(hub.files) == words | {"weights.safetensors"}
    assert (hub.commits, hub.private) == (["Upload export"], False)


def test_what_is_refused(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = model_folder(tmp_path / "m"), tmp_path / "other"
    other.mkdir()
    (other / "photo.jpg").touch()

    def said(*words: object) -> str:
        return refused(capsys, "push", *words)

    assert "is no model folder" in said(other, "me/model")
    assert "is no model folder" in said("open_clip:ViT-B-32", "me/model")
    assert "model is no repository" in said(model, "model")
    assert hub.asked == 0
    hub.refuse = True
    error = said(model, "me/model")
    assert ("me/model" in error, "403" in error, "hf_secret" in error) == (True, True, False)
    hub.refuse, hub.private = False, False
    assert "public" in said(model, "me/model", "--private")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in said(model, "me/model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged" in said(model, "me/model")
    assert (hub.files, hub.commits) == ({}, [])
