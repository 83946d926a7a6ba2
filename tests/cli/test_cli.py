"""The command line: its help, what it refuses, how a command ends, and what train, eval and data do by it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from commands import refused, said
from folders import model_folder
from kiloword import __version__, load
from kiloword.cli.clip_benchmark import load_kiloword
from kiloword.cli.describe import extras, parameters, slots
from kiloword.cli.main import VERBS, main
from kiloword.config.recipes import sizes
from kiloword.distributed.device import cores
from kiloword.methods.registry import PRESETS, components, preset
from kiloword.models.build import build

RUN = ["--data", "scenes?n=64", "--size", "debug", "--batch", "8", "--steps", "3", "--vocab", "300"]
NAMES = [name for group in VERBS.values() for name in group]
Capture = pytest.CaptureFixture[str]


def run(*words: object) -> None:
    main([str(word) for word in words])


def help_of(capsys: Capture, *words: str, page: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        main([*words, page])
    assert not end.value.code
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run("train", "clip", *RUN, "--out", out)
    return out / "model"


def test_help_has_a_line_for_each_verb(capsys: Capture) -> None:
    for words in ([], ["--help"]):
        main(words)
        output = capsys.readouterr().out
        assert re.findall(r"^  (\w+) +[A-Z].*\.$", output, re.MULTILINE) == NAMES
    main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("verb", NAMES)
def test_help_of_every_verb_describes_its_flags(verb: str, capsys: Capture) -> None:
    output = help_of(capsys, verb)
    assert "--help" in output
    if verb not in ("eval", "sweep"):
        assert not re.search(r"--[\w-]+ (\{[^}]*\}|[A-Z]+\b|[\[\]|. ])* \((default|required)", output)


def test_help_of_train_has_the_common_flags_and_of_all_the_defaults_of_the_method(capsys: Capture) -> None:
    common = help_of(capsys, "train", "siglip")
    assert "kiloword train siglip --data scenes" in help_of(capsys, "train")
    assert "--optim.lr FLOAT" in common
    assert "--optim.beta1" not in common
    assert "Settings of siglip (--settings.NAME): " in common
    everything = help_of(capsys, "train", "siglip", "--size", "b32", page="--help-all")
    assert "--settings.bias FLOAT initial bias; the logit is scale * cosine + bias (default: -10.0)" in everything
    assert "--model.image.width INT width of a token (default: 768)" in everything


def test_help_needs_no_torch() -> None:
    code = """
import sys
from kiloword.cli.main import main
for words in "", "train", "plan", "embed", "search", "eval probe", "doctor", "methods", "sizes":
    try:
        main([*words.split(), "--help"])
    except SystemExit:
        pass
print({"torch", "matplotlib", "starlette"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_verbs_and_flags(shell: str, capsys: Capture) -> None:
    script = help_of(capsys, "--completion", page=shell)
    assert all(word in script for word in (*NAMES, "--json", "show"))


REFUSED = [  # words, what the message says
    ("trian siglip --out x", "Did you mean train?"),
    ("data stat x", "stat"),
    ("import openclip x --out y", "openclip"),
    ("recipes show llip-b31", "Did you mean llip-b32?"),
    ("score m --images a.png --txts b", "--texts"),
    ("train siglip --captions many --out x", "--captions"),
    ("train siglip --transforms compose --out x", "--transforms"),
    ("train siglip --optim.lr nan --out x", "--optim.lr is nan"),
    ("train --out x", "needs a method"),
    ("train siglop --out x", "Did you mean siglip?"),
    ("train clip --data A --data B --out o", "--data is given twice"),
    ("embed m --data --out o", "--data is missing"),
    ("score m --images a.jpg --texts x --texts=y", "--texts is given twice"),
    ("classify m --images a --classes dog cat --json HERE", "--json"),
    ("eval retrieval m --data d --json FILE/deep.json", "--json"),
    ("score m --images a.jpg --texts dog --plane HERE", "--plane"),
    ("train siglip --out= --data d", "empty"),
    ("score m --images EMPTY --texts a", "empty"),
    ("score m --images a.png --texts BLANK", "text 1 of --texts is empty"),
    ("caption m --data scenes?n=4 --out c.csv", ".parquet"),
    ("data check scenes --png x.png", "--png"),
    ("data stats scenes?n=2 --as sigli --png x.png", "Did you mean siglip?"),
    ("import open_clip w.pt --out o", "NAME PATH"),
    ("import prolip ViT w.pt --out o", "PATH"),
    ("verify clip --ranks", "--ranks"),
    ("verify clip --ranks 8", "choice '8'"),
    ("--completion csh", "bash"),
    ("data check scenes --as clip", "--as"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_refused_before_any_work(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    placed = {"EMPTY": "", "BLANK": "  ", "HERE": str(tmp_path)}
    message = refused(capsys, *(placed.get(word, word) for word in words.split()))
    assert says in re.sub(r"[\s│]+", " ", message)
    assert "Traceback" not in message
    assert {path.name for path in tmp_path.iterdir()} == {"FILE"}


ENDS = [  # what is raised, exit code (None: a bug, with its traceback), what the one line on stderr says
    ("KeyboardInterrupt('3 rows are kept.')", 130, "kiloword: interrupted: 3 rows are kept."),
    ("ZeroDivisionError", None, ""),
    ('RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes.")', 2, "out of memory"),
    ("RuntimeError('PytorchStreamWriter failed writing file data/1: file write failed')", 2, "No space left"),
    ("OSError(28, 'No space left on device')", 2, "No space left"),
]


@pytest.mark.parametrize(("error", "code", "says"), ENDS)
def test_how_a_command_ends(
    error: str, code: int | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / f"ends_{len(error)}.py").write_text(f"def preset():\n    raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit if code else ZeroDivisionError) as end:
        run("train", f"ends_{len(error)}:preset", *RUN, "--out", tmp_path / "out")
    if code:
        message = capsys.readouterr().err
        assert end.value.code == code  # type: ignore[union-attr]
        assert says in message
        assert message.count("\n") == 1


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m kiloword recipes; echo $? >&2"
    done = subprocess.run(f"({command}) | head -1", shell=True, capture_output=True, text=True, env=os.environ)
    assert done.stderr.strip() in ("0", "1")
    assert done.stdout.count("\n") == 1


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    dry = (*RUN, "--out", tmp_path / "out", "--dry-run")
    assert "scale=10 bias=-10" in said(capsys, "train", "siglip", *dry)
    output = said(capsys, "train", "llip+caption+mim", *dry, "--size", "tiny", "--size=debug")
    assert "llip+caption+mim" in output
    assert "model      debug, " in output
    for warmup in (2000, 3):  # longer than the run, and as long
        noted = "note" in said(capsys, "train", "clip", *dry, "--optim.lr", "1e-5", "--optim.warmup", warmup)
        assert noted == (warmup == 2000)
    assert not list(tmp_path.iterdir())


DRY = [  # flags, what the refusal says; "" where they are taken
    ("fff", "features"),
    ("fff --features nowhere", "nowhere"),
    ("llip --settings.heads 7", "--settings.heads"),
    ("clip-c --settings.partner file --settings.partner-file none.parquet", "none.parquet"),
    ("clip --batch 80", "batch"),
    ("clip --micro 3", "micro"),
    ("clip --captions 0", "captions"),
    ("clip --epochs 1e308 --steps None", "--epochs"),
    ("clip --epochs 0.01 --steps None", "0.08 steps"),
    # what would change nothing
    ("clip --model.head.pool-queries 8", "--model.head.pool-queries"),
    ("llip --model.image.extra-tokens 3", "--model.image.extra-tokens"),
    ("llip+compose --model.head.image-pool max", "--model.head.image-pool"),
    ("flair --model.head.no-image-projection", "--model.head.image-projection"),
    ("prolip --model.text.no-causal", "--model.text.causal"),
    ("clip --optim.name adamw --optim.muon-lr 0.1", "--optim.muon-lr"),
    ("coca --settings.caption-share 0.25", "--settings.caption-share"),
    ("clip+caption --settings.caption.caption-op token", "--settings.caption.caption-op"),
    ("clip --init MODEL --settings.scale 5", "--settings.scale"),
    ("clip --init MODEL --model.text.width 16", "--model.text.width"),
    ("siglip --init MODEL --settings.scale 5", ""),
    ("clip --model.head.pool-queries 8 --model.head.image-pool attentional", ""),
    ("coca --settings.caption-share 0.25 --settings.caption-mask random", ""),
]


@pytest.mark.parametrize(("words", "says"), DRY)
def test_dry_run_refuses_what_training_would(
    words: str, says: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    method, *flags = words.replace("MODEL", str(model)).split()
    rest = RUN[:2] + RUN[4:-2] if "--init" in flags else RUN
    with pytest.raises(SystemExit) if says else nullcontext() as end:
        run("train", method, *rest, *flags, "--out", tmp_path, "--dry-run")
    output = capsys.readouterr()
    assert says in output.err
    assert bool(output.out) == (not says)
    assert end is None or end.value.code == 2
    assert not list(tmp_path.iterdir())


def test_train_with_settings_and_validation(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    own = ["--settings.scale", 5, "--settings.sigmoid.bias", -3, "--val", "scenes:test?n=16", "--captions", "all"]
    run("train", "clip+sigmoid", *RUN, *own, "--out", out)
    output = capsys.readouterr()
    assert output.out == f"model: {out / 'model'}\n"
    assert "val at step 3: text_retrieval_recall@1" in output.err
    file = load(out / "model").file
    assert file is not None
    assert (file.method, file.settings["scale"], file.settings["sigmoid"]["bias"]) == ("clip+sigmoid", 5, -3)


def test_start_from_a_model(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """It brings its towers and tokenizer; what is frozen stays."""
    words = ["train", "clip", *RUN[:2], *RUN[4:-2], "--init", model, "--freeze", "image", "--out", tmp_path / "out"]
    assert f"(from {model.parent.name}/model" in said(capsys, *words, "--dry-run")
    run(*words)
    old, new = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model" / "model.safetensors")
    changed = {name.split(".")[0] for name in old if not bool((old[name] == new[name]).all())}
    assert changed == {"text_tower", "head"}
    assert (tmp_path / "out" / "model" / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


def test_sizes_name_every_size(capsys: Capture) -> None:
    assert parameters(sizes()["b32"]) == 151_277_313  # ViT-B/32 as OpenAI released it
    model = build(sizes()["debug"], preset("clip"))
    assert parameters(sizes()["debug"]) == sum(p.numel() for p in model.parameters())
    main(["sizes"])
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]}
    for name, config in sizes().items():
        assert rows[name][-1] == f"{parameters(config) / 1e6:.2f}"
        assert rows[name][1:3] == [str(config.image.size), str(config.image.patch)]


def test_methods_name_every_preset_and_component(capsys: Capture) -> None:
    main(["methods"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in lines[len(PRESETS) + 1 :]}
    for name, line in zip(PRESETS, lines[1:], strict=False):
        assert re.split(r"\s{2,}", line.strip()) == [word for word in slots(preset(name)).values() if word]
    assert all(rows[name] == [name, one.slot, one.summary] for name, one in components().items())
    found = {name: slots(preset(name)) for name in PRESETS}
    stated = {"prolip": "uncertainty gaussian", "vqa": "pair_loss ", "clip-c": "transforms compose"}
    stated |= {"llip": "pooling contextual", "sycoca": "terms caption, mim", "fff": "captions all"}
    for method, words in {**stated, "siglip": "positives annotated"}.items():
        assert any(f"{slot} {component}" == words for slot, component in found[method].items()), words


def test_doctor_says_what_is_here(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    main(["doctor"])
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert "OMP_WAIT_POLICY=ACTIVE" in output
    assert f"{torch.get_num_threads()} of torch on {cores()} cores" in output
    assert extras()["fast"]["simplejpeg"]
    assert "extra fast" in output


def test_what_clip_benchmark_gets(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    model, transform, tokenizer = load_kiloword("kiloword", str(folder), device="cpu")
    with torch.no_grad():
        images = model.eval().encode_image(transform(Image.new("RGB", (50, 40), "red"))[None])
        texts = model.encode_text(tokenizer(["a dog", "a cat"]).to("cpu"))
    assert (images.shape, texts.shape) == ((1, 16), (2, 16))
    torch.testing.assert_close(images.norm(dim=1), torch.ones(1))
    by_name = load_kiloword(str(folder), "")[0].eval()
    torch.testing.assert_close(by_name.encode_text(tokenizer(["a cat"])).detach(), texts[1:])


@pytest.mark.slow
def test_the_command_of_clip_benchmark_finds_our_digits(shared: Path, tmp_path: Path) -> None:
    """On a model of ours: `python -m kiloword.cli.clip_benchmark`."""
    for package in ("clip_benchmark", "webdataset", "requests", "sklearn", "pycocoevalcap"):
        pytest.importorskip(package, reason=f"CLIP_benchmark's command imports {package}")
    model, data = model_folder(tmp_path / "model"), shared / "wds_cifar10"
    command = [sys.executable, "-m", "kiloword.cli.clip_benchmark", "eval", "--model_type", "kiloword", "--no_amp"]
    command += ["--model", "kiloword", "--pretrained", str(model), "--dataset", "wds/cifar10"]
    command += ["--dataset_root", str(data), "--num_workers", "0", "--output", str(tmp_path / "theirs.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "theirs.json").read_text())["metrics"]
    flags = ["--data", str(data / "test"), "--templates", "cifar10", "--json", str(tmp_path / "ours.json")]
    main(["eval", "zeroshot", str(model), *flags])
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert theirs
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-6)
