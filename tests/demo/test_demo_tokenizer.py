"""The page's tokenizer in JavaScript: the ids of kiloword's own, and of BERT's, from the files of an export."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import BertProcessing

from folders import model_folder
from kiloword.data.scenes.source import open_scenes
from kiloword.data.text.tokenizer import encoder_tokenizer
from kiloword.interop.export.source import Exported
from kiloword.interop.export.words import write_tokenizer
from kiloword.models.trust import NONE

PAGE = Path(__file__).resolve().parents[2] / "demo" / "page"
ENCODE = f"""
import {{ readFileSync }} from "node:fs";
import {{ Tokenizer }} from "{(PAGE / "tokenizer.js").as_uri()}";
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


pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node, which runs the page's JavaScript")


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


def test_a_vocabulary_of_another_library_is_refused(source: Exported, tmp_path: Path) -> None:
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["model"]["type"] = "Unigram"
    done = encoded(document, {"model_max_length": 32}, [])
    assert done.returncode
    assert "vocabularies" in done.stderr
