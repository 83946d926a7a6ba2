"""The demo page: what is built, the model's own ranking and messages in a browser, and the ids of its tokenizer."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import BertProcessing
from torch import Tensor

from commands import module_at
from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.apps.quickstart.scenes import Scenes, draw_all
from kiloword.data.scenes.source import open_scenes
from kiloword.data.text.tokenizer import encoder_tokenizer
from kiloword.interop.export.source import Exported
from kiloword.interop.export.words import write_tokenizer
from kiloword.models.trust import NONE
from tars import photos_in

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "demo" / "node_modules"
COUNT, SHOWN = 45, 12  # scenes of the page, and of a ranking
TOLERANCE = 2e-5  # of a score, between onnxruntime-web and torch
STATE = "document.documentElement.dataset.state"
LONG = "a red circle left of a blue star " * 20


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return module_at(ROOT / "demo" / "build.py", "demo_build")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("demo") / "model", "clip")


@pytest.fixture(scope="module")
def page(build: ModuleType, model: Path) -> Path:
    """The page of a model with random weights."""
    if not (PACKAGES / "onnxruntime-web").is_dir():
        pytest.skip("onnxruntime-web is not installed: make demo-packages installs it")
    if find_spec("onnxscript") is None:
        pytest.skip("onnxscript is not installed, which the export needs")
    out = model.parent / "page"
    assert build.main(["page", str(model), str(out), "--count", str(COUNT)]) == 0
    return out


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    module_at(ROOT / "tools" / "browser.py", "browser")
    return module_at(ROOT / "tools" / "accessibility.py", "accessibility")


@pytest.fixture(scope="module")
def browser(tools: ModuleType) -> Iterator[Any]:
    if sys.modules["browser"].program() is None:
        pytest.skip("no Chromium on the path")
    with tools.Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(page: Path, tools: ModuleType) -> Iterator[str]:
    with tools.served(page) as address:
        yield address


@pytest.fixture(scope="module")
def matcher(model: Path) -> Matcher:
    return load(model)


@pytest.fixture(scope="module")
def scenes(matcher: Matcher) -> Scenes:
    return draw_all(f"scenes:test?n={COUNT}", matcher.model.config.image.size)


def settled(browser: Any) -> str:
    """The page's message, after a ranking or an error."""
    browser.wait(f"['done', 'error'].includes({STATE})")
    text: str = browser.evaluate("document.getElementById('status').textContent")
    return text


def shown(browser: Any) -> list[tuple[int, float]]:
    """The ranking that the page shows: scene and score."""
    items = "Array.from(document.querySelectorAll('#images li'), (li) => [+li.dataset.image, +li.dataset.score])"
    return [(scene, score) for scene, score in browser.evaluate(items)]


def check_ranking(ranking: list[tuple[int, float]], scores: Tensor, tolerance: float = TOLERANCE) -> None:
    """The best of `scores` [I], in their order but for scores that are equal within the tolerance."""
    assert len({scene for scene, _ in ranking}) == len(ranking) == SHOWN
    best = scores.sort(descending=True).values
    assert best[0] - best[-1] > 1000 * tolerance  # else any order would do
    for place, (scene, score) in enumerate(ranking):
        assert abs(score - float(scores[scene])) < tolerance
        assert abs(float(best[place]) - float(scores[scene])) < 2 * tolerance


@pytest.mark.slow
def test_the_page_ranks_as_the_model_does(
    browser: Any, address: str, matcher: Matcher, scenes: Scenes, tmp_path: Path
) -> None:
    browser.emulate(1280, 800)
    browser.open(address)
    browser.wait(f"{STATE} === 'ready'")
    browser.evaluate("document.getElementById('q').focus()")
    browser.keys("a red circle\n")  # by the keyboard alone
    assert settled(browser).startswith(f"{COUNT} scenes ranked in ")
    check_ranking(shown(browser), matcher.score(scenes.pixels, ["a red circle"])[:, 0])

    browser.open(f"{address}?q={LONG.strip().replace(' ', '+')}")
    ((tokens, room),) = matcher.tokenizer.cut([LONG], matcher.model.config.text).values()
    assert f"has {tokens} tokens, of which the model reads the first {room}." in settled(browser)
    check_ranking(shown(browser), matcher.score(scenes.pixels, [LONG])[:, 0])

    features = matcher.encode_image(scenes.pixels)["vec"]
    browser.open(f"{address}?like=7")
    settled(browser)
    check_ranking(shown(browser), features @ features[7])
    assert shown(browser)[0][0] == 7

    # of the model's size, so that nothing is resized
    Image.fromarray(scenes.pixels[9].permute(1, 2, 0).numpy()).save(tmp_path / "nine.png")
    browser.choose("#file", tmp_path / "nine.png")
    browser.wait("document.getElementById('results').textContent === 'Images like nine.png'")
    check_ranking(shown(browser), features @ features[9])
    assert browser.problems == []


@pytest.mark.slow
def test_messages_of_the_page(browser: Any, address: str, page: Path, tools: ModuleType, tmp_path: Path) -> None:
    browser.open(address)
    browser.wait(f"{STATE} === 'ready'")
    browser.evaluate("document.querySelector('#ask button').click()")
    assert "The sentence is empty" in settled(browser)
    assert browser.problems == []

    shutil.copytree(page, tmp_path / "page")
    (tmp_path / "page" / "model" / "text.onnx").unlink()
    with tools.served(tmp_path / "page") as broken:
        browser.open(f"{broken}?q=a+dog")
        assert "model/text.onnx is missing (status 404)" in settled(browser)
    browser.open((tmp_path / "page" / "index.html").as_uri())
    assert "file server" in browser.evaluate("document.getElementById('status').textContent")
    with tools.Browser() as other:
        other.before("delete globalThis.WebAssembly")
        other.open(address)
        assert "WebAssembly" in settled(other)
        assert other.problems == []


@pytest.mark.slow
def test_the_page_is_accessible(browser: Any, address: str, tools: ModuleType, tmp_path: Path) -> None:
    if not tools.AXE.is_file():
        pytest.skip("axe-core is not installed: make demo-packages installs it")
    assert tools.check(browser, f"{address}?q=a+red+circle", f"{STATE} === 'done'") == []
    bad = '<!doctype html><html lang="en"><title>x</title><main><h1>x</h1><img src="data:,"><p style="width:200vw">x'
    (tmp_path / "index.html").write_text(bad)
    with tools.served(tmp_path) as other:
        found = tools.check(browser, other)
    assert sum("image-alt" in line for line in found) == sum("scrolls sideways" in line for line in found) == 4


@pytest.mark.slow
def test_photos_take_the_place_of_scenes(build: ModuleType, page: Path, model: Path, tmp_path: Path) -> None:
    photos = photos_in(tmp_path / "photos")
    (photos / "00.jpg").write_bytes(b"no image")
    assert build.main(["page", str(model), str(tmp_path / "page"), "--photos", str(photos), "--count", "20"]) == 0
    facts = json.loads((tmp_path / "page" / "demo.json").read_text())
    assert (facts["what"], facts["captions"]) == ("photos", [""] * 5)
    vectors = np.fromfile(tmp_path / "page" / "features.bin", "<f4").reshape(5, -1)
    expected = load(model).encode_image(sorted(photos.glob("*.jpg"))[1:])["vec"].numpy()
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_what_makes_no_page_is_refused(build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "onnxruntime-web" / "dist").mkdir(parents=True)
    for name in build.RUNTIME:
        (tmp_path / "onnxruntime-web" / "dist" / name).touch()
    other, out = model_folder(tmp_path / "model", "prolip"), tmp_path / "page"
    for folder, packages, word in (
        (out, tmp_path, "cosine"),  # Gaussians
        (out, tmp_path / "nowhere", "make demo"),
        (other, tmp_path, "other than a demo page"),
    ):
        assert build.main(["page", str(other), str(folder), "--packages", str(packages)]) == 1
        assert word in capsys.readouterr().err
    assert not out.exists()


def test_a_model_is_packed_with_its_card(build: ModuleType, model: Path, tmp_path: Path) -> None:
    archives = []
    for name in ("one", "two"):
        assert build.main(["model", str(model), str(tmp_path / name)]) == 0
        (archive,) = (tmp_path / name).glob("*.zip")
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    digest = hashlib.sha256(archives[0]).hexdigest()
    assert (tmp_path / "one" / "SHA256SUMS").read_text() == f"{digest}  clip-debug-0.zip\n"
    with zipfile.ZipFile(tmp_path / "one" / "clip-debug-0.zip") as packed:
        packed.extractall(tmp_path)
    unpacked = tmp_path / "clip-debug-0"
    assert "# clip (debug)" in (unpacked / "README.md").read_text()
    assert torch.equal(load(unpacked).encode_text(["a dog"])["vec"], load(model).encode_text(["a dog"])["vec"])


# The tokenizer


ENCODE = f"""
import {{ readFileSync }} from "node:fs";
import {{ Tokenizer }} from "{(ROOT / "demo" / "page" / "tokenizer.js").as_uri()}";
const [document, config, texts] = JSON.parse(readFileSync(0, "utf8"));
const tokenizer = new Tokenizer(document, config);
console.log(JSON.stringify(texts.map((text) => tokenizer.encode(text))));
"""
ODD = [
    "a dog", "", "   ", "A  Photo", "it's the dogs' 3rd ball, we'll", "'S 'LL don'T", "İstanbul ΣΑΣ Ὀδυσσεύς",
    "ẞ ﬁ Ǆ ŉ ſ K", "e\u0301a", "a \ufeffx\x85y\x1cz\u2028w", "日本語 가 각", "😀👍🏽", "<mask> <start> a", "aaab" * 90,
    "\ud800 x", "١٢٣ ½ ²", "\u200b a\u00ad", "a\x00b", "a\u0345", "-- !? a_b", "a red circle left of a blue star " * 40,
]  # fmt: skip
LETTERS = [chr(c) for part in ((0, 0x250), (0x370, 0x600), (0x1E00, 0x2100), (0x3040, 0x3100)) for c in range(*part)]


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node, which runs the page's JavaScript")


@pytest.fixture(params=["own", "bert"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Exported:
    """A model whose tokenizer is written to `tmp_path`."""
    exported = Exported.of(str(model_folder(tmp_path / "model", "clip")), NONE)
    if request.param == "bert":
        words = BertWordPieceTokenizer()
        words.train_from_iterator([*LETTERS, *ODD[:4], ODD[-1]], vocab_size=300, min_frequency=1, limit_alphabet=120)
        words.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        exported = replace(exported, tokenizer=encoder_tokenizer(words.to_str(), 300))
    write_tokenizer(exported, tmp_path)
    return exported


def encoded(*given: Any) -> subprocess.CompletedProcess[str]:
    words = ["node", "--input-type=module", "--eval", ENCODE]
    return subprocess.run(words, input=json.dumps(given), text=True, capture_output=True, check=False)


@needs_node
def test_ids_are_those_of_kiloword(source: Exported, tmp_path: Path) -> None:
    rng, scenes = random.Random(0), open_scenes("scenes:test?n=100")
    strange = ["".join(rng.choices(LETTERS, k=rng.randint(1, 14))) for _ in range(500)]
    texts = [*ODD, *strange, *(scenes.record(n).captions[0] for n in range(100))]
    done = encoded(
        *(json.loads((tmp_path / f"{n}.json").read_text()) for n in ("tokenizer", "tokenizer_config")), texts
    )
    assert not done.returncode, done.stderr

    expected = source.tokenizer.encode(texts, source.config.text)
    cut = source.tokenizer.cut(texts, source.config.text)
    assert 0 < len(cut) < len(texts) / 2
    for n, (text, answer) in enumerate(zip(texts, json.loads(done.stdout), strict=True)):
        assert answer["ids"] == expected.ids[expected.starts[n] : expected.starts[n + 1]].tolist(), ascii(text)
        assert answer["tokens"] == cut.get(n, (len(answer["ids"]) - 2,))[0], ascii(text)


@needs_node
def test_a_vocabulary_of_another_library_is_refused(source: Exported, tmp_path: Path) -> None:
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["model"]["type"] = "Unigram"
    done = encoded(document, {"model_max_length": 32}, [])
    assert done.returncode
    assert "vocabularies" in done.stderr
