"""`kiloword push`: which files a hub gets, in which commit; what is pushed is what `load` reads back."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kiloword
from folders import model_folder
from kiloword.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")  # huggingface_hub without hf_xet
MODEL_FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
SHA = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """The requests of huggingface_hub that push and load make, for one repository, me/model."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.private: bool | None = None  # None: there is no repository yet
        self.commits: list[str] = []
        self.refuse = 0
        self.asked: list[str] = []


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if hub.refuse:
            self.reply({"error": "refused"}, hub.refuse)
        elif hub.private is None:
            self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif path.startswith("/me/model/resolve/"):
            content = hub.files[path.rpartition("/")[2]]
            self.reply(content, X_Repo_Commit=SHA, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
        elif "/tree/" in path:
            names = sorted(hub.files)
            self.reply([{"type": "file", "path": n, "size": len(hub.files[n]), "oid": SHA} for n in names])
        else:
            names = [{"rfilename": name} for name in hub.files]
            self.reply({"id": "me/model", "sha": SHA, "private": hub.private, "siblings": names})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.reply({})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def do_POST(self) -> None:
        hub, path, body = self.server, self.path.split("?")[0], self.body()
        hub.asked.append(f"POST {path}")
        assert self.headers["Authorization"] == "Bearer hf_secret"
        if hub.refuse or (path == "/api/repos/create" and hub.private is not None):
            self.reply({"error": "refused", "url": f"{hub.url}/me/model"}, hub.refuse or 409)
        elif path == "/api/repos/create":
            hub.private = json.loads(body).get("visibility", "public") == "private" or json.loads(body).get("private")
            self.reply({"url": f"{hub.url}/me/model"})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {True: "lfs", False: "regular"}
            files = [{"path": n, "uploadMode": mode[n.endswith("tensors")], "shouldIgnore": False} for n in names]
            self.reply({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**x, "actions": {"upload": {"href": f"{hub.url}/large/{x['oid']}"}}} for x in objects]
            self.reply({"transfer": "basic", "objects": actions})
        else:
            assert path == "/api/models/me/model/commit/main"
            self.commit([json.loads(line) for line in body.splitlines()])

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                self.server.commits.append(value["summary"])
            elif key == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert key == "lfsFile"
                self.server.files[value["path"]] = self.server.large[value["oid"]]
        self.reply({"commitUrl": f"{self.server.url}/me/model/commit/{SHA}", "commitOid": SHA, "success": True})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    from huggingface_hub import constants

    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NO_PROXY", "*")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["push", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_run_goes_to_a_hub_and_comes_back(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "run" / "model")
    for private in ("state/step-1.json", "metrics.jsonl", "model/features.parquet", "model/notes.txt"):
        (tmp_path / "run" / private).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / private).write_text("mine")
    main(["push", str(tmp_path / "run"), "me/model", "--private", "--message", "First"])
    printed = capsys.readouterr().out
    assert "model.safetensors" in printed.partition("not uploaded: features.parquet, notes.txt")[0]
    assert (set(hub.files), hub.commits, hub.private) == (MODEL_FILES, ["First"], True)
    assert 'kiloword.load("hf-hub:me/model")' in hub.files["README.md"].decode()
    assert not (folder / "README.md").exists()
    back = kiloword.load("hf-hub:me/model")
    assert torch.equal(back.encode_text("a dog")["vec"], kiloword.load(folder).encode_text("a dog")["vec"])


def test_an_export_goes_with_its_own_files(hub: Hub, tmp_path: Path) -> None:
    main(["export", "safetensors", str(model_folder(tmp_path / "m")), "--out", str(tmp_path / "out")])
    (tmp_path / "out" / "data.tar").write_text("mine")
    hub.private = False
    main(["push", str(tmp_path / "out"), "me/model"])
    words = {"README.md", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"}
    assert set(hub.files) == words | {"weights.safetensors"}
    assert hub.commits == ["Upload export"]


def test_nothing_goes_where_the_hub_or_the_user_says_no(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(model_folder(tmp_path / "m"))
    hub.private = False
    assert "exists and is public: nothing was uploaded" in refused([model, "me/model", "--private"], capsys)
    for status in (401, 403, 500):
        hub.refuse = status
        error = refused([model, "me/model"], capsys)
        assert "did not take the upload to me/model" in error
        assert str(status) in error
        assert "hf_secret" not in error
    assert hub.files == {}
    hub.refuse = 0
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1:9 did not take" in refused([model, "me/model"], capsys)
    monkeypatch.delenv("HF_TOKEN")
    asked = len(hub.asked)
    assert "log in by `hf auth login`" in refused([model, "me/model"], capsys)
    assert len(hub.asked) == asked


def test_what_is_no_model_is_refused_before_a_hub_is_asked(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = model_folder(tmp_path / "m"), tmp_path / "other"
    other.mkdir()
    (other / "photo.jpg").touch()
    assert "holds photo.jpg: expected a model folder" in refused([str(other), "me/model"], capsys)
    assert "is no folder: expected a model folder" in refused([str(tmp_path / "none"), "me/model"], capsys)
    assert "model is no repository: expected ORG/NAME" in refused([str(model), "model"], capsys)
    assert "is a name: expected a folder" in refused(["open_clip:ViT-B-32", "me/model"], capsys)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged" in refused([str(model), "me/model"], capsys)
    assert hub.asked == []
