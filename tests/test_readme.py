"""What the README and the pages of docs show works as it stands there."""

from __future__ import annotations

import ast
import json
import os
import pydoc
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kiloword.cli.main import main
from kiloword.data.open import open_source
from kiloword.data.scenes.source import ScenesSource
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import PRESETS, components, preset
from kiloword.models.build import build
from kiloword.runs.rows import read_metrics
from kiloword.training.resolve import micro_batches
from kiloword.training.step import Learner, backward
from kiloword.types import TextGroup
from kiloword.verify import batch as verify_batch
from kiloword.verify.suite import learner, verify
from tars import pairs, photo, write_tar

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = ("python", "training", "fine-tune", "methods", "own-method", "evaluation", "scale")
SHOWING = (  # pages with commands and code that are run
    "README.md",
    "SKILL.md",
    *(
        f"docs/{page}.md"
        for page in ["python", "training", "fine-tune", "methods", "own-method", "evaluation", "scale"]
    ),
    *sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/papers/*.md")),
)
SHOWN = re.sub(r" \\\n +", " ", "\n".join((ROOT / page).read_text() for page in SHOWING))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", SHOWN, re.DOTALL) for line in block.splitlines()]
DEAR = "mine:preset, alike:captions, fill:preset, eval vqa, eval probe, --size g14, eval hierarchy, --seed 1, s16"
DEAR += ", mine.toml, smallest, --html"
OWN = ("mine", "alike", "copies", "fill")  # files of docs/own-method.md
REFERENCE = {ROOT / "docs" / name for name in re.findall(r": (reference/\w+\.md)", (ROOT / "mkdocs.yml").read_text())}
PAGES = [ROOT / "llms.txt", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/papers/*.md")]


def python(first_words: str) -> str:
    """The block of code that begins with this comment."""
    block = re.search(rf"```python\n(# {first_words}.*?)```", SHOWN, re.DOTALL)
    assert block, f"the pages have lost their example '{first_words}'"
    return block[1]


def test_a_pair_loss_without_its_derivative() -> None:
    """The hinge of docs/own-method.md, which names no gradient."""
    example: dict[str, Any] = {}
    exec(python("hinge.py"), example)
    method, batch = example["preset"](), verify_batch.batch()
    learner = Learner(build(verify_batch.config(), method), method)
    inputs = learner.inputs(batch, learner.encode(batch))["pair"]
    images, texts = inputs.rows, inputs.columns
    head = learner.model.head
    logits, matches = head.logits(head.score(images, texts)), images["position"][:, None] == texts["position"]
    expected = (1 - torch.where(matches, logits, -logits)).clamp(min=0).sum() / len(batch)
    losses = learner.pair_losses({"pair": inputs})["pair"], expected
    gradients = [torch.autograd.grad(loss, head.log_scale, retain_graph=True) for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of docs/own-method.md, for imports here and in processes."""
    for name in OWN:
        (tmp_path / f"{name}.py").write_text(python(f"{name}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def place(
    tmp_path: Path, modules: None, monkeypatch: pytest.MonkeyPatch, trained: Path, others: dict[str, Path]
) -> Path:
    """A folder with what the commands of the pages are about."""
    monkeypatch.chdir(tmp_path)
    for part in ("photos/train", "photos/dev", "sets/flickr30k", "sets/flickr8k", "sets/mscoco_captions"):
        write_tar(tmp_path / part / "0.tar", pairs(12))
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(photo(n))
    (tmp_path / "table.csv").write_text("image,caption\n" + "".join(f"{n}.png,a thing\n" for n in range(4)))
    item = {"key": "0000", "caption": "a thing", "negative_caption": "no thing"}
    (tmp_path / "sugarcrepe.json").write_text(json.dumps({"swap_obj": [item]}))
    write_coco(tmp_path / "coco")
    (tmp_path / "results.json").write_text(json.dumps([{"image_id": 42, "caption": "a thing"}]))
    (tmp_path / "mine.toml").write_text(SHOWN.split("```toml\n")[1].split("```")[0])
    for name in ("quickstart/model", "models/b32", "models/average"):
        shutil.copytree(trained, tmp_path / name)
    for run in ("photos", "big"):
        shutil.copytree(trained.parent, tmp_path / "runs" / run)
    for name, model in {**others, "tuned": trained}.items():
        shutil.copytree(model, tmp_path / "runs" / name / ("best" if name == "tuned" else "model"))
    (tmp_path / "quickstart" / "example.png").write_bytes(photo())
    (tmp_path / "dog.jpg").write_bytes(photo())
    return tmp_path


def write_coco(folder: Path) -> None:
    """A caption, a question with its answer and a test question, as COCO and VQAv2 have them."""

    def write(name: str, **content: Any) -> None:
        (folder / name).write_text(json.dumps(content))

    (folder / "annotations").mkdir(parents=True)
    for subset in ("train2014", "val2014", "test2015"):
        (folder / subset).mkdir()
        (folder / subset / f"COCO_{subset}_{42:012d}.jpg").write_bytes(photo())
        questions = [{"image_id": 42, "question_id": 420, "question": "what is it?"}]
        write(f"v2_OpenEnded_mscoco_{subset}_questions.json", questions=questions, data_subtype=subset)
    images = [{"id": 42, "file_name": f"COCO_val2014_{42:012d}.jpg"}]
    write("annotations/captions_val2014.json", images=images, annotations=[{"image_id": 42, "caption": "a thing"}])
    answers = [{"question_id": 420, "answers": [{"answer": "dog"}] * 10}]
    write("v2_mscoco_train2014_annotations.json", annotations=answers)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("siglip", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the methods that have commands of their own."""
    made = {name: train(name, tmp_path_factory.mktemp("run")) for name in ("prolip", "sycoca")}
    vqa = train("vqa", tmp_path_factory.mktemp("run"), "--init", str(made["sycoca"]))
    return {**made, "vqa": vqa}


def train(method: str, out: Path, *more: str) -> Path:
    data = "scenes:train?n=64&task=vqa" if method == "vqa" else "scenes?n=64"
    size = () if "--init" in more else ("--size", "debug", "--vocab", "300")
    words = f"train {method} --data {data} --batch 8 --steps 2 --out"
    main([*words.split(), str(out), *size, *more])
    return out / "model"


def case(line: str) -> Any:
    """Commands that take seconds run among the slow tests: their verbs have main tests of their own."""
    return pytest.param(line, marks=pytest.mark.slow) if any(word in line for word in DEAR.split(", ")) else line


@pytest.mark.parametrize(
    "command", [case(line) for line in dict.fromkeys(COMMANDS) if line.startswith(("kiloword ", "torchrun "))]
)
def test_command(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training is planned rather than done, with a batch that the few images here fill."""
    words = shlex.split(command)
    words = words[words.index("kiloword") + 1 :]
    if words[0] in ("import", "verify"):
        pytest.skip("has tests of its own")
    if ("--recipe" in words or "mine.toml" in words) and not find_spec("open_clip"):
        pytest.skip("open_clip, whose vocabulary the recipe names, is not installed")
    if words[0] == "train":
        sized = ("--batch", "--micro")
        words = [w for n, w in enumerate(words) if w not in sized and words[n - 1] not in sized]
        words += ["--batch", "4", "--dry-run"]
    if words[0] in ("train", "average"):
        words[words.index("--out") + 1] = "planned"  # the folder on the page holds the model that others use
    if words[0] == "sweep":
        words.append("--dry-run")
    if "--features" in words:
        main(["embed", "runs/photos/model", "--data", "photos/train", "--out", "features"])
    if "captions.parquet" in words and words[0] != "caption":
        main(["caption", "runs/sycoca/model", "--data", "photos/train", "--out", "captions.parquet", "--longest", "8"])
    if words[0] == "eval" and words[1] == "caption":
        words.append("--judge.no-meteor")  # Java takes seconds to start
    main(words)
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", [line for line in COMMANDS if "-m kiloword train" in line])
def test_ranks_and_micro_batches_cut_the_batch_into_equal_parts(command: str) -> None:
    """With the batch of the page, which the few images of other tests do not fill."""
    words = shlex.split(command)
    ranks, batch, micro = (int(words[words.index(flag) + 1]) for flag in ("--nproc-per-node", "--batch", "--micro"))
    assert micro_batches(replace(default_recipe("siglip"), batch=batch, micro=micro), ranks) > 1


def test_make_knows_its_targets() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [line.split()[1] for line in COMMANDS if line.startswith("make ")]
    assert asked == ["quickstart", "check", "photos"]
    elsewhere = re.findall(r"`make ([\w-]+)`", "".join(page.read_text() for page in PAGES))
    assert {*asked, *elsewhere} <= set(targets)


EXAMPLES = {  # the comment that a block begins with: what is true after it has run
    "Score": "scores.shape == chances.shape == (1, 2) and all(abs(features.norm(dim=1) - 1) < 1e-5)",
    "Use a model": "scores.shape == (1, 2) and len(vectors) == 1",
    "Train on": 'steps("runs/mine") == 1 and model.score(["0.png"], ["a thing", "another"]).shape == (1, 2)',
    "Train with a function": 'steps("runs/mine") == 1 and model.score(["0.png"], ["a dog", "a cat"]).shape == (1, 2)',
    "Train in Python": 'steps("runs/pets") == 1 and model.score(["0.png"], ["a dog", "a cat"]).shape == (1, 2)',
    "Gaussians": 'texts["log_var"].shape == texts["vec"].shape',
}


@pytest.mark.parametrize("first_words", EXAMPLES)
def test_code_of_the_pages(first_words: str, place: Path) -> None:
    code = python(first_words)
    assert first_words != "Score" or len([line for line in code.splitlines() if line]) <= 8
    code = code.replace("steps=2000", "steps=1").replace('"tiny"', '"debug"').replace("batch=128", "batch=4")
    code = re.sub(r"(kiloword\.train\(.*)\)", r'\1, size="debug", workers=0)', code)
    names: dict[str, Any] = {
        "dataset": [(str(place / f"{n}.png"), f"thing {n}") for n in range(4)],
        "steps": lambda run: read_metrics(Path(run, "metrics.jsonl"))[-1]["step"],
    }
    exec(code, names)
    assert eval(EXAMPLES[first_words], names)


def test_the_example_is_true_of_its_image() -> None:
    """The image is the first held-out scene. The first text and the first class fit it, the second ones do not."""
    scenes = open_source("scenes:test?n=500", 64)
    assert isinstance(scenes, ScenesSource)
    calls = [node for node in ast.walk(ast.parse(python("Score"))) if isinstance(node, ast.Call)]
    given = {call.func.attr: call for call in calls if isinstance(call.func, ast.Attribute)}
    texts = ast.literal_eval(given["score"].args[1])
    (template,) = ast.literal_eval(given["classify"].keywords[0].value)
    classes = [template.format(c=name) for name in ast.literal_eval(given["classify"].args[1])]
    assert scenes.relevance([*texts, *classes], range(1))[:, 0].tolist() == [True, False, True, False]
    assert scenes.relevance(["a pink moon and a yellow moon"], range(1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mine:preset", "siglip+alike:captions", "copies:preset", "fill:preset"])
def test_methods_of_the_page_conform(method: str, modules: None) -> None:
    ranks = (1,) if method == "mine:preset" else (1, 2)
    assert all(check.passed for check in verify(method, ranks))


def test_masked_patches_of_the_page_predict_the_teachers(modules: None) -> None:
    """iBOT's eq. 1 at the masked places, patch by patch, with a centre that is not 0."""
    shown: dict[str, Any] = {}
    exec(python("test_fill.py"), shown)
    made, some, term = shown["made"], shown["some"], shown["term"]
    assert set(shown["losses"]) == {"pair", "fill", "loss"}
    torch.testing.assert_close(shown["loss"].detach(), shown["losses"]["fill"], rtol=1e-12, atol=0)
    term.centre.copy_(0.1 * torch.randn(256, generator=torch.Generator().manual_seed(0)))
    masks: list[torch.Tensor] = []
    of_tower = made.model.image_tower.register_forward_pre_hook(lambda tower, given: masks.append(given[2]))
    loss = term(made.model, some, made.encode(some)) / term.count(some)
    of_tower.remove()
    total = torch.zeros((), dtype=torch.float64)
    (mask,) = [given for given in masks if given is not None]
    assert mask.sum(1).tolist() == [2] * len(some)
    assert len(mask.unique(dim=0)) > 2
    for image, hidden in zip(some.images, mask, strict=True):
        seen = term.teacher.tower(made.model.normalise(image[None]))[0]
        student = made.model.image_tokens(image[None], masked=hidden[None])[0]
        for place in hidden.nonzero()[:, 0].tolist():
            goal = ((term.teacher.outputs(seen[1 + place]) - term.centre) / 0.04).exp()  # after the class token
            answer = (term.outputs(student[1 + place]) / 0.1).exp()
            total = total - (goal / goal.sum() * (answer / answer.sum()).log()).sum()
    learned = [*made.model.image_tower.parameters(), *term.outputs.parameters()]
    losses = loss, total / (2 * len(some))
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(one, learned) for one in losses]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


def test_captions_of_the_page_match_copies_of_their_image(modules: None) -> None:
    """The sigmoid loss of arXiv:2303.15343, eq. 1, pair by pair; captions without a copy have negatives alone."""
    made, some = learner("copies:preset"), verify_batch.batch(method="copies:preset")
    group, head = some.inputs["copies"], made.contrasts["copies"].head
    assert isinstance(group, TextGroup)
    texts = made.encode(some).texts["vec"]
    copies, total = made.model.encode_text(group.texts)[1]["vec"], torch.zeros((), dtype=torch.float64)
    for text, of in zip(texts, some.image_of_text, strict=True):
        for other, image in zip(copies, group.image_of_text, strict=True):
            logit = head.log_scale.exp() * (text @ other) + head.bias  # type: ignore[operator, union-attr]
            total = total - torch.where(of == image, logit, -logit).sigmoid().log().sum()
    torch.testing.assert_close(backward(made, [some])["copies"], (total / len(texts)).detach(), rtol=1e-10, atol=0)


def test_table_of_presets_is_true() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for heading in ("## Presets\n", "### What fills their slots\n"):
        table = page.split(heading)[1].split("\n#")[0]
        assert sorted(re.findall(r"^\| `([\w+-]+)` \|", table, re.MULTILINE)) == list(PRESETS)
    listed = re.findall(r"`\+([\w-]+)`", page.split("## Components\n")[1].split("\n#")[0])
    assert sorted(listed) == sorted(components())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository, and to headings of the pages among them."""
    for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if target in REFERENCE:  # generated: the build of the site checks the link
            continue
        assert target.exists(), path
        assert not heading or heading in headings(target), f"{path}#{heading}"


def headings(page: Path) -> list[str]:
    """As GitHub names their anchors."""
    lines = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", line).replace(" ", "-").lower() for line in lines]


@pytest.mark.parametrize(
    "page",
    [*(ROOT / p for p in (*SHOWING, "CONTRIBUTING.md", "docs/change.md")), *ROOT.glob("docs/[ag]*.md")],
    ids=lambda p: p.name,
)
def test_files_and_names_that_it_names_exist(page: Path) -> None:
    """`room/file.py`, `room/file.py:Class.method` and `kiloword.module.name`; rooms of the package need no prefix."""
    text = page.read_text()
    for path in re.findall(r"^python .*?(\S+\.py)", text, re.MULTILINE):
        assert (ROOT / path).exists(), path
    for path, name in re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*\.(?:py|sh|toml))(?::([\w.]+))?`", text):
        if "NAME" in path:  # of a file that somebody is going to write
            continue
        file = next((base / path for base in (ROOT, ROOT / "kiloword") if (base / path).exists()), None)
        assert file, path
        assert not name or name in definitions(ast.parse(file.read_text())), f"{path}:{name}"
    for dotted in re.findall(r"`(kiloword(?:\.\w+)+)[(`]", text):
        assert pydoc.locate(dotted) is not None, dotted


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Names of functions, classes, methods and variables."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def test_folders_of_the_tree_exist() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    words = re.findall(r"(?:\w+/)*\w+\.py|\b\w+/(?= )", tree)
    assert len(words) > 15
    for word in words:
        assert (ROOT / word).exists() or (ROOT / "kiloword" / word).exists(), word
    rooms = [path for path in (ROOT / "kiloword").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {f"{path.name}/" for path in rooms} <= set(words)
    picture = (ROOT / "docs" / "assets" / "rooms.svg").read_text()
    shown = [name for text in re.findall(r">([a-z ·]+)</text>", picture) for name in text.split(" · ")]
    assert shown[: len(rooms)] == re.findall(r"^  (\w+)/", tree, re.MULTILINE)


def test_citation() -> None:
    """Of papers that presets implement."""
    papers = re.findall(r"arXiv:[\d.]+", (ROOT / "CITATION.cff").read_text())
    assert len(papers) == 5
    assert set(papers) <= {preset(name).source for name in PRESETS}
