"""A model folder is data: code that it names runs when the user names it too, and then exactly that."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import kiloword
from commands import refused
from folders import changed, model_folder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.generation.captioners import open_captioner
from kiloword.models.model_folder import load_model
from kiloword.models.trust import Trust
from kiloword.stores.teachers import open_teacher
from tars import photo

OWN = """
open("imported", "a").close()
from dataclasses import replace
from kiloword.methods.registry import preset as built_in

def preset():
    return replace(built_in("siglip"), name="own")

def other():
    return preset()

def stop():
    raise SystemExit(9)
"""
SCORE = ("--images", "a.png", "--texts", "a dog")
SCENES = ("--data", "scenes?n=24")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(autouse=True)
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder: a module, an image, a model that asks for the module, and one that asks for nothing."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "a.png").write_bytes(photo())
    shutil.copytree(base, tmp_path / "plain")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    asks_for("own:preset")


def asks_for(method: str) -> None:
    """The folder `asks`, whose config names a method."""
    changed(Path(shutil.copytree("plain", "asks", dirs_exist_ok=True)), "config.json", method=method)


def ran() -> bool:
    return Path("imported").exists() or "own" in sys.modules


VERBS = [
    ("eval", "retrieval", "asks", *SCENES),
    ("eval", "spectrum", "plain", "asks", *SCENES),
    ("embed", "asks", *SCENES, "--out", "features"),
    ("caption", "asks", *SCENES, "--out", "c.parquet"),
    ("train", "siglip", "--init", "asks", *SCENES, "--steps", "1", "--batch", "8", "--out", "run"),
    ("train", "clip", "--init", "asks", *SCENES, "--steps", "1", "--batch", "8", "--out", "run", "--dry-run"),
]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: f"{words[0]}-{words[2]}")
def test_no_verb_imports_what_a_model_names(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words)
    assert all(word in said for word in ("asks", "own:preset", "--method", "--trust-code"))
    assert not ran()


CODE = ("own:preset+compose", "siglip+own:preset", "own:stop", "../../own:preset", ":x", "a:b:c")
NAMES = dict.fromkeys(CODE, "which is code") | dict.fromkeys(("siglip+own", "own.preset", "+", "x" * 5000), "expected")


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_imported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    asks_for(name)
    said = refused(capsys, "score", "asks", *SCORE)
    assert NAMES[name] in said
    assert len(said) < 1000
    for opens in (load, load_model, open_teacher, open_captioner):
        with pytest.raises(ValueError, match=r"\w"):
            opens("asks", "cpu")
    assert not ran()


@pytest.mark.parametrize("word", [("--method", "own:preset"), ("--trust-code",)])
def test_code_runs_when_the_user_says_so(word: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[str, Any] = {"trust_code": True} if word == ("--trust-code",) else {"method": word[1]}
    assert load("asks", **said).method.name == "own"  # type: ignore[union-attr]
    assert ran()
    main(["score", "asks", *SCORE, *word])
    main(["eval", "retrieval", "asks", *SCENES, *word])
    main(["embed", "asks", *SCENES, "--out", "features", *word])
    assert "is used" not in capsys.readouterr().err
    words = ("caption", "asks", *SCENES, "--out", "c.parquet", word[0].replace("--method", "--model-method"), *word[1:])
    assert "no text decoder" in refused(capsys, *words)  # it was loaded


def test_a_model_of_code_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Its scores need the head alone: with a built-in method, settings of the loss are left out, and named."""
    changed(Path("plain"), "config.json", method="gone:preset", settings={"gamma": 2.0, "bias": -10.0})
    assert "'gone'" in refused(capsys, "score", "plain", *SCORE, "--method", "gone:preset")
    main(["score", "plain", *SCORE, "--method", "siglip"])
    assert "gamma" in capsys.readouterr().err


def test_naming_one_method_does_not_trust_another(capsys: pytest.CaptureFixture[str]) -> None:
    """The user's method is used in place of the model's, and a line says so; what the model names stays unimported."""
    main(["score", "asks", *SCORE, "--method", "siglip"])
    assert re.search("own:preset.*'siglip' is used", capsys.readouterr().err)
    main(["average", "asks", "asks", "--out", "mean"])
    assert not ran()
    for method, named in (("siglip+own:preset", "siglip"), ("own:preset", "own:other")):
        asks_for(method)
        with pytest.raises(ValueError, match="is code"):
            load_model("asks", trust=Trust(named=named))
    assert not ran()
    words = ("eval", "spectrum", "plain", "asks", *SCENES, "--method", "siglip")
    assert "own:preset" in refused(capsys, *words)
    assert not ran()


@pytest.mark.parametrize("words", [("own:preset",), ("siglip", "--trust-code")], ids=str)
def test_training_starts_from_a_model_of_its_own_method(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """And goes on by the same command."""
    more = (*SCENES, "--batch", "8", "--init", "asks", "--out", "run", "--quiet")
    main(["train", *words, *more, "--steps", "1"])
    main(["train", *words, *more, "--steps", "2", "--extend"])
    assert json.loads(Path("run/model/config.json").read_text())["steps"] == 2
    if words[0] != "siglip":
        assert "is code" in refused(capsys, "score", "run/model", *SCORE)
        main(["score", "run/model", *SCORE, "--method", "own:preset"])


# The package's own code

EVIL = (
    *("eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module", "os.system", "yaml.load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "joblib.load", "shelve.open"),
)


def test_no_call_of_the_package_runs_what_a_file_holds() -> None:
    """Nothing is unpickled or evaluated, and transformers runs no code of a folder."""
    for path in Path(kiloword.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name, where = ast.unparse(call.func), f"{path}:{call.lineno}"
            options = {str(k.arg): ast.unparse(k.value) for k in call.keywords}
            assert name not in EVIL, where
            assert options.get("allow_pickle", "False") == options.get("shell", "False") == "False", where
            if name.endswith("torch.load"):
                assert options["weights_only"] == "True", where
            if name.endswith(("from_pretrained", "from_config")):
                assert '"trust_remote_code": False' in text or options["trust_remote_code"] == "False", where
                assert "from_config" in name or '"local_files_only": True' in text or "local_files_only" in options, (
                    where
                )
