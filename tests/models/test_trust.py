"""A model folder is data: code that it names runs when the user names it too, and then exactly that."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

import kiloword
from folders import model_folder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.features.teachers import open_teacher
from kiloword.generation.captioners import open_captioner
from kiloword.models.model_folder import load_model
from kiloword.models.trust import Trust, _without_code
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
PACKAGE = Path(kiloword.__file__).parent
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
    shutil.copytree("plain", "asks", dirs_exist_ok=True)
    config = json.loads(Path("plain/config.json").read_text()) | {"method": method}
    Path("asks/config.json").write_text(json.dumps(config))


def ran() -> bool:
    return Path("imported").exists() or "own" in sys.modules


def ends(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that is refused prints."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    said = capsys.readouterr()
    assert end.value.code == 2, said
    assert "Traceback" not in said.err
    return said.err


VERBS = [
    ("score", "asks", *SCORE),
    ("eval", "retrieval", "asks", *SCENES),
    ("eval", "spectrum", "plain", "asks", *SCENES),
    ("embed", "asks", *SCENES, "--out", "features"),
    ("caption", "asks", *SCENES, "--out", "c.parquet"),
    ("train", "siglip", "--init", "asks", *SCENES, "--steps", "1", "--batch", "8", "--out", "run"),
    ("train", "clip", "--init", "asks", *SCENES, "--steps", "1", "--batch", "8", "--out", "run", "--dry-run"),
]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: f"{words[0]}-{words[2]}")
def test_no_verb_imports_what_a_model_names(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    said = ends(capsys, *words)
    assert "asks was trained by the method 'own:preset', which is code" in said
    assert "--method MODULE:PRESET" in said
    assert "--trust-code" in said
    assert not ran()


@pytest.mark.parametrize("name", ["own:preset+compose", "own:stop", "../../own:preset", ":x", "a:", "own:preset:x"])
def test_no_name_of_code_is_imported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    asks_for(name)
    assert f"the method {name!r}, which is code" in ends(capsys, "score", "asks", *SCORE)
    for opens in (load, load_model, open_teacher, open_captioner):
        with pytest.raises(ValueError, match="is code"):
            opens("asks", "cpu")
    assert not ran()


@pytest.mark.parametrize("name", ["siglip+own:preset", "siglip+own", "own", "own.preset", "", "+", "x" * 5000])
def test_other_names_are_unknown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    asks_for(name)
    assert len(ends(capsys, "score", "asks", *SCORE)) < 1000
    assert not ran()


@pytest.mark.parametrize("word", [("--method", "own:preset"), ("--trust-code",)])
def test_code_runs_when_the_user_says_so(word: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    main(["score", "asks", *SCORE, *word])
    assert ran()
    main(["eval", "retrieval", "asks", *SCENES, *word])
    main(["embed", "asks", *SCENES, "--out", "features", *word])
    assert "is used" not in capsys.readouterr().err
    words = ("caption", "asks", *SCENES, "--out", "c.parquet", word[0].replace("--method", "--model-method"), *word[1:])
    assert "no text decoder" in ends(capsys, *words)  # it was loaded


def test_code_runs_from_python() -> None:
    assert load("asks", method="own:preset").method.name == "own"  # type: ignore[union-attr]
    assert load("asks", trust_code=True).method.name == "own"  # type: ignore[union-attr]


def test_a_method_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(Path("plain/config.json").read_text()) | {"settings": {"bias": -8.0}}
    Path("plain/config.json").write_text(json.dumps(config))
    message = ends(capsys, "score", "plain", *SCORE, "--method", "clip")
    assert "clip does not fit plain, which was trained by siglip: settings of clip: bias" in message


def test_a_model_of_code_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Its scores need the head alone: with a built-in method, settings of the loss are left, and named."""
    config = json.loads(Path("plain/config.json").read_text())
    config |= {"method": "gone:preset", "settings": {"gamma": 2.0, "bias": -10.0}}
    Path("plain/config.json").write_text(json.dumps(config))
    message = ends(capsys, "score", "plain", *SCORE, "--method", "gone:preset")
    assert "No module named 'gone'" in message
    assert "Without its file, name the method whose head it has: --method siglip." in message
    assert _without_code("llip+compose+gone:loss") == "llip+compose"
    main(["score", "plain", *SCORE, "--method", "siglip"])
    assert "siglip has no setting gamma: what the model says of it is not used." in capsys.readouterr().err


def test_naming_one_method_does_not_trust_another(capsys: pytest.CaptureFixture[str]) -> None:
    """The user's method is used in place of the model's, and a line says so; what the model names stays unimported."""
    main(["score", "asks", *SCORE, "--method", "siglip"])
    assert "asks asks for the method 'own:preset': 'siglip' is used, as --method says" in capsys.readouterr().err
    assert not ran()
    with pytest.raises(ValueError, match="is code"):
        load_model("asks", trust=Trust(named="own:other"))
    assert not ran()
    words = ("eval", "spectrum", "plain", "asks", *SCENES, "--method", "siglip")
    assert "asks: asks was trained by the method 'own:preset', which is code" in ends(capsys, *words)
    assert not ran()


def test_models_beside_the_first_may_have_its_method(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("asks", "again")
    main(["eval", "spectrum", "asks", "again", "plain", *SCENES, "--method", "own:preset"])
    assert "is used" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("own:preset",), ("own:preset", "--transforms", "compose"), ("siglip", "--trust-code")], ids=str
)
def test_training_starts_from_a_model_of_its_own_method(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """And goes on by the same command."""
    more = (*SCENES, "--batch", "8", "--init", "asks", "--out", "run", "--quiet")
    main(["train", *words, *more, "--steps", "1"])
    main(["train", *words, *more, "--steps", "2", "--extend"])
    assert json.loads(Path("run/model/config.json").read_text())["steps"] == 2
    if words[0] != "siglip":
        assert "is code" in ends(capsys, "score", "run/model", *SCORE)
        main(["score", "run/model", *SCORE, "--method", "own:preset"])


@pytest.mark.parametrize("verb", ["train", "verify", "plan"])
@pytest.mark.parametrize("name", ["../../x:y", ":y", "x:", "a..b:c", "a-b:c", "math:pi", "a:b:c", "y" * 5000])
def test_names_that_are_no_module(verb: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = ends(capsys, verb, name, *(("--out", "run") if verb == "train" else ()))
    assert "expected" in said
    assert len(said) < 1000


# The package's own code


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the package with its file."""
    return [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def named(*names: str) -> list[tuple[str, ast.Call]]:
    """Calls of a function or method of one of the names, such as "torch.load" or "eval"."""
    return [(file, call) for file, call in calls() if ast.unparse(call.func) in names]


def option(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def test_nothing_is_unpickled_or_evaluated() -> None:
    loads = [(file, call) for file, call in calls() if ast.unparse(call.func).endswith("torch.load")]
    assert {file for file, _ in loads} == {"interop/open_clip.py"}
    assert all(option(call, "weights_only") == "True" for _, call in loads)
    arrays = named("np.load", "numpy.load", "np.memmap")
    assert {file for file, _ in arrays} <= {"data/feature_store.py"}
    assert not [file for file, call in calls() if option(call, "allow_pickle") not in (None, "False")]
    evil = ("eval", "exec", "compile", "__import__", "runpy.run_path", "runpy.run_module", "os.system", "yaml.load")
    assert not named(*evil, "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "joblib.load")
    assert not [file for file, call in calls() if option(call, "shell") not in (None, "False")]
    texts = {p: p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}
    imports = ("import pickle", "from pickle", "import marshal", "import shelve", "import dill", "import joblib")
    assert not [p.name for p, text in texts.items() for line in text.splitlines() if line.strip().startswith(imports)]


def test_modules_are_imported_by_names_of_ours_alone() -> None:
    """`find` has a method's name of the command line, or one that `trust.method_of` lets pass."""
    by_name = named("importlib.import_module", "import_module")
    asked = {(file, ast.unparse(call.args[0]).replace('"', "'")) for file, call in by_name}
    assert {(file, name) for file, name in asked if not name.startswith("'")} == {
        ("evaluation/task.py", "module"),  # `Deferred`, of names in the declarations of tasks
        ("methods/registry.py", "f'kiloword.methods.{path}'"),
        ("methods/registry.py", "module_name"),
        ("model/trunks/library.py", "name"),
    }
    texts = {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}
    by_file = {name for name, text in texts.items() if "preset(file.method" in text or "find(file.method" in text}
    assert by_file == {"models/average.py"}, "the method of a model folder goes through trust.method_of"
    assert 'None if ":" in file.method else find(file.method)' in texts["models/average.py"]


def test_transformers_runs_no_code_of_a_folder() -> None:
    loads = [(file, call) for file, call in calls() if ast.unparse(call.func).endswith("from_pretrained")]
    assert sorted(file for file, _ in loads) == [
        "features/teachers.py",
        "features/teachers.py",
        "interop/export/to_transformers.py",
        "interop/export/to_transformers.py",
        "interop/text_towers.py",
        "interop/towers.py",
    ]
    shared = '"local_files_only": True, "trust_remote_code": False'
    for file, call in loads:
        written = ast.unparse(call)
        if "local_only" in [ast.unparse(k.value) for k in call.keywords if k.arg is None]:
            assert shared in (PACKAGE / file).read_text(encoding="utf-8"), file
        else:
            assert (option(call, "local_files_only"), option(call, "trust_remote_code")) == ("True", "False"), written
        if "other_class" not in written and "AutoTokenizer" not in written:  # of processors, which have no weights
            assert option(call, "use_safetensors") == "True", written
    made = [(file, call) for file, call in calls() if ast.unparse(call.func).endswith("from_config")]
    assert {file for file, _ in made} == {"model/trunks/library.py", "model/trunks/padded.py"}
    for file, call in made:
        assert option(call, "trust_remote_code") == "False", (file, ast.unparse(call))


# what has a function `open` of its own, for bytes or for pages
BINARY = ("os", "tarfile", "Image", "gzip", "opener", "self.parent", "zipfile", "webbrowser")


def test_every_text_file_has_an_encoding() -> None:
    """Or a file of ours is called damaged where the locale is not UTF-8."""
    bare = []
    for file, call in calls():
        name = ast.unparse(call.func).rpartition(".")[2]
        modes = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
        mode = next((m for m in modes if isinstance(m, str) and m and set(m) <= set("rwaxbt+")), "r")
        owner = ast.unparse(call.func).rpartition(".")[0]
        opens = name == "open" and owner not in BINARY
        texts = name in ("read_text", "write_text") or (opens and "b" not in mode)
        if texts and option(call, "encoding") is None and not (name == "read_text" and call.args):
            bare.append(f"{file}:{call.lineno}: {ast.unparse(call)}")
    assert not bare


@pytest.mark.parametrize(
    ("file", "value", "says"),
    [
        (
            "config.json",
            {"text_config": {"num_hidden_layers": 100_000}},
            "num_hidden_layers is 100000: expected at most",
        ),
        (
            "config.json",
            {"vision_config": {"hidden_size": 10**9}},
            "hidden_size is 1000000000: expected at most 4194304",
        ),
        ("config.json", {"a": [1, {"depths": [2000]}]}, "depths is 2000: expected at most 1024"),
        ("config.json", {"eps": float("nan")}, "eps is nan"),
    ],
)
def test_folders_of_transformers_that_declare_too_much(
    tmp_path: Path, file: str, value: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before transformers is imported."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "clip"}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / file).write_text(json.dumps({"model_type": "clip", **value}))
    for verb in (("embed", "hf:hf", "--out", "features"), ("caption", "hf:hf", "--out", "c.parquet")):
        assert says in ends(capsys, *verb, *SCENES)
