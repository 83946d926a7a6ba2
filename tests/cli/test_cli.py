"""The command line: what its help says, how fast it is there, what each verb prints."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from cases import mostly_slow
from kiloword import __version__
from kiloword.apps.plan.request import Plan
from kiloword.cli.main import app, main
from kiloword.cli.train import Train
from kiloword.config.options import RunOptions
from kiloword.config.recipes import sizes
from kiloword.config.settings import leaves
from kiloword.methods.defaults import default_recipe
from kiloword.training.log import read_metrics
from tars import pairs, photo, write_tar

RUN = ["--data", "scenes?n=64", "--size", "debug", "--batch", "8", "--steps", "3", "--vocab", "300"]

# Every setting has a place below --optim, --augment or --model: a flag up here is a decision, not a habit.
FLAGS = (
    "out steps epochs samples dry-run pooling transforms positives pair-loss uncertainty contrasts terms size init "
    "freeze unfreeze image-tower text-tower batch micro chunk precision matmul seed data weights val extra-captions "
    "raw-captions features captions first-captions rows together decoder bad-share tokenizer vocab recipe config "
    "keep workers device log-every log-to save-every eval-every eval-epochs keep-best patience keep-states timeout "
    "max-skipped-steps parallel checkpointing compile extend trust-code quiet image-features text-features"
)
VERBS = (
    "train sweep quickstart eval score embed audit index search serve caption mine data verify plan import export push "
    "average watch methods recipes sizes doctor"
)


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    run("train", "clip", *RUN, "--out", out)
    return out / "model"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "cache"))
    write_tar(tmp_path / "photos" / "0.tar", pairs(12))
    return tmp_path / "photos"


def flags_of(kind: type) -> set[str]:
    """The flags of a dataclass of settings, without those of the model."""
    run = kind(recipe=default_recipe("", "tiny")) if kind is Train else kind()
    shown = [leaf for leaf in leaves(run) if leaf.field.metadata.get("flag") != ""]
    return {leaf.flag for leaf in shown if not leaf.flag.startswith("model.")}


def test_flags_of_train_are_these() -> None:
    assert {flag for flag in flags_of(Train) if "." not in flag} == set(FLAGS.split())


def help_of(capsys: pytest.CaptureFixture[str], *words: str, page: str = "--help") -> str:
    with pytest.raises(SystemExit) as end:
        main([*words, page])
    assert not end.value.code
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def test_help_names_every_verb_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    output = help_of(capsys)
    for verb in VERBS.split():
        assert re.search(rf"\b{verb} \w+", output), verb


def options_in(output: str) -> dict[str, str]:
    """Every option of a help page -> the text beside it, without its values and its default."""
    entries: list[list[str]] = [[]]
    for line in output.splitlines():
        words = line.strip("\u2502| ")
        entries += [[]] if re.match(r"--?\w", words) or not words else []
        entries[-1].append(words)
    options = {}
    values = r"(?:\{[^}]*\}|[A-Z]+\b|[\[\]|. ])*"
    for words in map(" ".join, entries):
        if match := re.match(rf"(?:-h, )?--([\w.-]+)(?:[ ,|]+--[\w.-]+)*\s*{values}(.*)", words):
            options[match[1]] = match[2].partition("(default")[0].partition("(required")[0]
    return options


def names_of(verb: str) -> set[str]:
    """Options of a verb, as its signature or its dataclasses declare them."""
    if kind := {"train": Train, "plan": Plan}.get(verb):
        return flags_of(kind)
    parameters = inspect.signature(app._subcommands[verb].target).parameters.values()
    plain = [
        p.name
        for p in parameters
        if not re.search("Positional|Options|Trust|Sequence|Config|Execution", str(p.annotation))
    ]
    return {name.strip("_").replace("_", "-") for name in plain}


def options_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    with pytest.raises(SystemExit) as end:
        main([*words])
    assert not end.value.code
    return options_in(capsys.readouterr().out)


@pytest.mark.parametrize("verb", VERBS.split())
def test_help_of_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option is there, with a text."""
    options = options_of(capsys, verb, "--help-all" if verb in ("train", "plan") else "--help")
    assert names_of(verb) | {"help"} <= options.keys()
    bare = [name for name, text in options.items() if not re.search("[a-z]{3}", text)]
    assert [name for name in bare if not name.startswith("model.text.special.")] == []  # ids by name


@pytest.mark.parametrize("method", ["fff", "llip", "prolip", "sycoca", "vqa"])
def test_settings_of_methods_have_a_text(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(capsys, "train", method, "--help-all")
    settings = {k: v for k, v in options.items() if k.startswith("settings.")}
    assert len(settings) > 4
    assert [name for name, text in settings.items() if not re.search("[a-z]{3}", text)] == []


def test_help_of_train_has_defaults_of_the_method_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    output = help_of(capsys, "train", "siglip", "--size", "b32", page="--help-all")
    assert "--settings.bias FLOAT initial bias; the logit is scale * cosine + bias (default: -10.0)" in output
    assert "--model.image.width INT width of a token (default: 768)" in output


@pytest.mark.parametrize("words", [("train",), ("train", "llip"), ("plan", "siglip")])
def test_help_shows_the_common_flags_and_names_the_page_of_all(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--size", "b32", "--help"])
    output = capsys.readouterr().out
    common = options_in(output).keys() - {"help", "help-all", "settings.NAME"}
    assert 15 < len(common) <= 31
    everything = options_of(capsys, *words, "--help-all").keys()
    assert common < everything
    settings = re.findall(r"Settings of \w+ \(--settings.NAME\): (.*)\.", output)
    assert bool(settings) == (len(words) == 2), "of a method alone"
    for name in settings and settings[0].split(", "):
        assert f"settings.{name}" in everything
    assert output.splitlines()[-1].endswith(f"{' '.join([*words, 'METHOD'][:2])} --help-all")
    assert ("these are for scenes" in output) == (words[0] == "train")
    output = re.sub(r"[\s│]+", " ", output)
    assert "--size STR size of the towers (`kiloword sizes` lists them) (default: b32)" in output
    for group in ("length", "model", "loss", "hardware"):
        assert f"{group} options" in output


def test_nothing_is_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert not end.value.code
    assert "quickstart" in capsys.readouterr().out
    main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import kiloword", 10_000),
        ("from kiloword.cli.main import main; main(['--help'])", 650_000),
        ("from kiloword.cli.main import main; main(['train', '--help'])", 1_100_000),
        ("from kiloword.cli.main import main; main(['plan', '--help'])", 950_000),
    ],
)
def test_instant_and_without_torch(code: str, most: int) -> None:
    """Few calls, and of other packages those of the command line alone. `bench/start.py` takes the time."""
    measure = (
        "import sys\nfrom counting import calls\nbefore = set(sys.modules)\n"
        f"def work():\n    {code}\n"
        "def ends():\n    try:\n        work()\n    except SystemExit:\n        pass\n"
        "count = calls(ends)\n"
        "files = {name: getattr(sys.modules[name], '__file__', None) or '' for name in {*sys.modules} - before}\n"
        "print('', count, *{n.partition('.')[0] for n, file in files.items() if 'site-packages' in file})\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    words = [sys.executable, "-c", measure]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    count, *packages = done.stdout.splitlines()[-1].split()
    allowed = {"kiloword", "tyro", "docstring_parser", "typeguard", "typing_extensions"}
    assert {package for package in packages if not package.startswith("_")} <= allowed
    assert 100 < int(count) < most


def test_who_uses_a_model_waits_for_no_module_of_training() -> None:
    slow = "{'torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch._dynamo', 'fsspec', 'tensorboard'}"
    code = f"import sys, kiloword.api; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_documentation_gives_the_time_limit_of_a_run() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name in ("data.md", "faults.md"):
        values = re.findall(r"`--timeout` \((\d+) s", (docs / name).read_text())
        assert values == [str(RunOptions().timeout)]


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--micro", 4, "--checkpointing", "whole", "--precision", "bf16")
    run("train", "siglip", *RUN, "--out", tmp_path / "out", "--dry-run", "--optim.lr", 0.01, *how)
    output = capsys.readouterr().out
    assert "1, 2 x 4 images each, checkpointing whole, compile none, bf16" in output
    assert "siglip scale=10 bias=-10" in output
    assert "3 steps of 8 images, 0.4 epochs" in output
    assert "lr=0.01" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["fff"], "fff needs precomputed features named 'teacher'"),
        (["fff", "--features", "nowhere"], "nowhere holds no features"),
        (["llip", "--settings.heads", "7"], "--settings.heads 7 does not divide"),
        (["clip-c", "--settings.partner", "file", "--settings.partner-file", "none.parquet"], "none.parquet"),
        (["clip", "--batch", "80"], "fewer than one batch of 80"),
        (["clip", "--micro", "3"], "micro 3 does not divide"),
        (["clip", "--captions", "0"], "captions is 0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_dry_run_refuses_what_training_would(
    words: list[str], output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = [w for w in RUN if w not in ("--batch", "8")] if "--batch" in words else RUN
    with pytest.raises(SystemExit) as end:
        run("train", *words, *rest, "--out", tmp_path / "out", "--dry-run")
    assert end.value.code == 2
    assert output in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


IDLE = [  # words, the flag without effect
    (["clip", "--model.head.pool-queries", "8"], "--model.head.pool-queries"),
    (["llip", "--model.image.extra-tokens", "3"], "--model.image.extra-tokens"),
    (["llip+compose", "--model.head.image-pool", "max"], "--model.head.image-pool"),
    (["filip", "--model.head.text-pool", "mean"], "--model.head.text-pool"),
    (["flair", "--model.head.no-image-projection"], "--model.head.image-projection"),
    (["prolip", "--model.text.no-causal"], "--model.text.causal"),
    (["clip", "--optim.name", "adamw", "--optim.muon-lr", "0.1"], "--optim.muon-lr"),
    (["clip", "--augment.blur-sigma", "1", "3"], "--augment.blur-sigma"),
    (["coca", "--settings.caption-share", "0.25"], "--settings.caption-share"),
    (["clip+caption", "--settings.caption.caption-op", "token"], "--settings.caption.caption-op"),
    (["siglip", "--init", "MODEL", "--settings.scale", "5"], ""),
    (["clip", "--init", "MODEL", "--settings.scale", "5"], "--settings.scale"),
    (["clip", "--model.head.pool-queries", "8", "--model.head.image-pool", "attentional"], ""),
    (["llip", "--model.head.text-pool", "mean", "--settings.scale", "5", "--augment.crop", "0.5"], ""),
    (["coca", "--settings.caption-share", "0.25", "--settings.caption-mask", "random"], ""),
]


@pytest.mark.parametrize(
    ("words", "told"), IDLE, ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else ""
)
def test_settings_that_change_nothing_are_refused(
    words: list[str], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in words]
    rest = RUN[:2] + RUN[4:-2] if "--init" in words else RUN
    with pytest.raises(SystemExit) if told else nullcontext():
        run("train", *words, *rest, "--out", tmp_path / "out", "--dry-run")
    output = capsys.readouterr()
    assert told in output.err
    assert bool(told) == ("Omit settings without effect." in output.err) == (not output.out)


def test_settings_of_a_method_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain fields, which declare nothing."""
    (tmp_path / "plain_fields.py").write_text(
        "from dataclasses import dataclass\nfrom kiloword.methods import siglip\n\n"
        "@dataclass(frozen=True)\nclass Mine:\n    x: int = 1\n\n"
        "def preset(settings: Mine):\n    return siglip.preset(siglip.Settings())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run("train", "plain_fields:preset", *RUN, "--settings.x", "3", "--out", tmp_path / "out", "--dry-run")
    assert "plain_fields:preset x=3" in capsys.readouterr().out


def test_sharding_over_one_process_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "clip", *RUN, "--out", tmp_path / "out", "--dry-run", "--parallel", "fsdp")
    assert (
        "note       --parallel fsdp shards nothing in one process: start several by torchrun."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "words", [["--transforms", "compose", "--transforms", "mixup"], ["--features=a", "--features", "b"]]
)
def test_a_flag_given_twice_is_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("train", "clip", *RUN, *words, "--out", tmp_path / "out")
    assert end.value.code == 2
    assert f"{words[0].partition('=')[0]} is given twice" in capsys.readouterr().err


EMPTY = {
    "train": ["siglip", "--data", "scenes?n=4", "--out", ""],
    "train --out=": ["siglip", "--data", "scenes?n=4", "--out="],
    "train --data": ["siglip", "--data", "", "--out", "out"],
    "train --init": ["siglip", "--init", "", "--out", "out"],
    "train --features": ["siglip", "--features", "side", "", "--out", "out"],
    "quickstart": ["--out", ""],
    "eval": ["retrieval", "", "--data", "scenes:test?n=4"],
    "eval --json": ["retrieval", "model", "--data", "scenes:test?n=4", "--json", ""],
    "score": ["model", "--images", "", "--texts", "a"],
    "score --explain": ["model", "--images", "a.png", "--texts", "a", "--explain", ""],
    "embed": ["model", "--data", "scenes?n=4", "--out", ""],
    "caption": ["model", "--data", "scenes?n=4", "--out", ""],
    "audit": ["scenes?n=4", "--model", "model", "--out", ""],
    "mine": ["scenes?n=4", "--features", "", "--out", "out"],
    "data": ["index", ""],
    "import": ["open_clip", "ViT-B-32", "", "--out", "out"],
    "watch": [""],
    "plan --json": ["siglip", "--samples", "1e6", "--json", ""],
}


@pytest.mark.parametrize("words", EMPTY)
def test_an_empty_path_is_not_the_current_directory(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(words.split()[0], *EMPTY[words])
    assert ended.value.code == 2
    assert re.fullmatch(r"kiloword: \S+ got an empty value, .*\n", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "output"), [("", "--texts got an empty value"), ("  ", "text 2 of --texts is empty: expected words")]
)
def test_an_empty_text_is_refused(text: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("score", tmp_path / "none", "--images", "a.png", "--texts", "a", text)
    assert end.value.code == 2
    assert output in capsys.readouterr().err


def test_terms_takes_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "llip", *RUN, "--terms", "caption", "mim", "--out", tmp_path / "out", "--dry-run")
    assert "llip+caption+mim" in capsys.readouterr().out


def test_captions_are_not_written_under_the_name_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run("caption", tmp_path, "--data", "scenes?n=4", "--out", tmp_path / "c.csv")
    assert end.value.code == 2
    assert "let --out end in .parquet" in capsys.readouterr().err


def test_the_last_of_a_flag_counts_for_defaults_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "clip", *RUN, "--size", "tiny", "--size=debug", "--batch", "4", "--out", tmp_path, "--dry-run")
    output = capsys.readouterr().out
    assert "3 steps of 4 images" in output
    assert "model      debug, " in output
    assert " size=32 patch=16" in output


@pytest.mark.parametrize(
    ("length", "steps"), [(["--epochs", "2"], 16), (["--samples", "33"], 4), (["--steps", "5"], 5)]
)
def test_three_ways_to_say_how_long(
    length: list[str], steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "scenes?n=64", "--batch", "8", *length]
    run("train", "siglip", *words, "--out", tmp_path / "out", "--dry-run")
    assert f"{steps} steps of 8 images" in capsys.readouterr().out


def test_a_run_that_ends_in_its_warmup_is_reported_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "clip", *RUN, "--size", "debug", "--optim.lr", "1e-5", "--out", tmp_path / "out"]
    told = "the warm-up takes 2000 steps and the run has 3: the learning rate reaches 1.5e-08 instead of 1e-05."
    run(*words, "--optim.warmup", "2000", "--dry-run")
    assert f"note       {told}" in capsys.readouterr().out
    run(*words, "--optim.warmup", "3", "--dry-run")
    assert "note" not in capsys.readouterr().out
    run(*words, "--optim.warmup", "2000")
    output = capsys.readouterr().err
    assert output.index(f"note: {told}") < output.index("step 3/3")


@pytest.mark.parametrize(
    "data", mostly_slow([["scenes?n=15"], ["scenes?n=9", "scenes:val?n=12", "--weights", "1", "0.5"]], 1)
)
def test_epochs_are_passes_over_the_data_as_they_are_counted(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """15 rows are three batches of 4 and a remainder that is dropped; the run stops and resumes between."""
    words = ["train", "clip", "--data", *data, "--size", "debug", "--vocab", "300", "--batch", 4, "--captions", 2]
    words += ["--out", tmp_path, "--log-every", 3]
    run(*words, "--epochs", 4, "--dry-run")
    assert "length     12 steps of 4 images, 4.0 epochs" in capsys.readouterr().out
    run(*words, "--epochs", 1)
    run(*words, "--epochs", 4, "--extend")
    assert [row["epoch"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "step 12/12  epoch 4.00  " in capsys.readouterr().err


def test_train_with_settings_and_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    own = ["--settings.scale", 5, "--settings.bias", -3, "--val", "scenes:test?n=16", "--captions", "all"]
    run("train", "siglip", *RUN, *own, "--out", out, "--log-every", 1)
    output = capsys.readouterr()
    assert output.out == f"model: {out / 'model'}\n"
    assert "val at step 3: text_retrieval_recall@1" in output.err
    assert json.loads((out / "config.json").read_text())["recipe"]["settings"] == {"scale": 5.0, "bias": -3.0}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    named = {
        "loss",
        "pair",
        "scale",
        "bias",
        "gradient_norm",
        "pairs_per_s",
        "data_wait",
        "loader_pairs_per_s",
        "skipped",
        "truncated",
        "skipped_steps",
        "captions",
        "epoch",
        "lr",
        "memory",
        "save_s",
        "time",
        "restarts",
    }
    assert rows[0].keys() == named | {"step"}
    assert "val/text_retrieval_recall@1" in rows[3]


def test_start_from_a_model(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("train", "clip", *RUN[:-2], "--init", model, "--freeze", "image", "--out", out)
    from safetensors.torch import load_file

    old, new = load_file(model / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    changed = {name.split(".")[0] for name in old if not bool((old[name] == new[name]).all())}
    assert changed == {"text_tower", "head"}
    assert (out / "model" / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


@pytest.mark.slow
def test_mixture_tokens_start_from_a_model_with_a_class_token_and_back(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    words = ["--data", "scenes?n=64", "--batch", 8, "--steps", 1, "--freeze", "image"]
    run("train", "llip", *words, "--init", model, "--out", tmp_path / "there")
    assert "image_tower.class_token" in capsys.readouterr().err.partition("left over: ")[2]
    run("train", "clip", *words, "--init", tmp_path / "there" / "model", "--out", tmp_path / "back")
    assert "image_tower.class_token" in capsys.readouterr().err.partition("new: ")[2].partition("left over: ")[0]
    folders = (model, tmp_path / "there" / "model", tmp_path / "back" / "model")
    old, there, back = (load_file(f / "model.safetensors")["image_tower.positions"] for f in folders)
    assert (old[1:] == there).all()
    assert (there == back[1:]).all()
    run("train", "llip", *words, "--init", folders[1], "--model.image.size", 48, "--out", tmp_path / "larger")
    assert len(load_file(tmp_path / "larger" / "model" / "model.safetensors")["image_tower.positions"]) == 9
    with pytest.raises(SystemExit):
        run("train", "llip", *words, "--init", folders[1], "--settings.k", 4, "--out", tmp_path / "other")
    assert "image_tower.extra_tokens" in capsys.readouterr().err


def test_a_model_to_start_from_brings_its_towers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "siglip", "--data", "scenes?n=64", "--batch", 8, "--steps", 1, "--init", model, "--out", tmp_path]
    run(*words, "--dry-run")
    output = capsys.readouterr().out
    assert f"model      debug from {model}" in output
    assert " size=32 patch=16 width=32" in output
    run(*words, "--model.image.size", 48)
    assert "(images of 48 pixels instead of 32)" in capsys.readouterr().err
    for flag, value in (("--model.text.width", 16), ("--model.head.dim", 8)):
        with pytest.raises(SystemExit) as end:
            run(*words, flag, value)
        assert end.value.code == 2
        assert f"{flag} is {value}, but" in capsys.readouterr().err


def test_eval_prints_and_writes_the_same(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("eval", "retrieval", model, "--data", "scenes:test?n=16", "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(found)
    assert f"text_retrieval_recall@1 {found['text_retrieval_recall@1']:.4f}" in [" ".join(x.split()) for x in lines]
    assert found["text_retrieval_recall@10"] >= found["text_retrieval_recall@1"]


def test_eval_of_classes(model: Path, tmp_path: Path) -> None:
    run("eval", "zeroshot", model, "--data", "scenes:test?task=colour&n=16", "--json", tmp_path / "r.json")
    assert {"acc1", "acc5", "mean_per_class_recall"} <= json.loads((tmp_path / "r.json").read_text()).keys()


def test_score(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{n}.png" for n in range(2)]
    for n, file in enumerate(files):
        file.write_bytes(photo(n))
    run("score", model, "--images", *files, "--texts", "a dog", "a [red] cat")
    output = capsys.readouterr().out
    assert "a [red] cat" in output
    for file in files:
        assert re.search(rf"{file.name}\W+-?0\.\d{{3}}\W+-?0\.\d{{3}}", output)


def test_data(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "index", photos)
    run("data", "check", photos)
    assert "all samples are good" in capsys.readouterr().out
    run("data", "stats", photos, "--png", tmp_path / "samples.png")
    assert "images 12   captions 12   bad 0" in capsys.readouterr().out
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, words in (("methods", ("clip", "siglip")), ("sizes", tuple(sizes())), ("doctor", ("torch", "python"))):
        run(verb)
        output = capsys.readouterr().out
        assert all(word in output for word in words)
