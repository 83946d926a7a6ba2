"""Exports: the library of each target computes the features of the source; what `push` gives a hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kiloword
from commands import refused
from folders import TextPool, model_folder
from kiloword.cli.main import main
from kiloword.config.recipes import ModelConfig, ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer, clip_tokenizer_from
from kiloword.interop.export import graphs
from kiloword.interop.export.source import LIMIT, Exported, check_close
from kiloword.interop.export.weights import inverted
from kiloword.methods.registry import preset
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, save_model
from kiloword.models.trust import NONE

TEXTS = ["a dog", "wow !", "two cats and a dog"]
VISION = 'torch.library.Library("torchvision", "FRAGMENT")'
BEGIN = f"""
import sys, torch, numpy as np, torch.nn.functional as F
L = {VISION}
try:
    [L.define(f"{{n}}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor") for n in ("nms", "qnms")]
except RuntimeError:
    pass  # this build of torchvision has them
out, texts = sys.argv[1], {TEXTS!r}
pixels = torch.from_numpy(np.load(out + ".pixels.npy"))
torch.set_grad_enabled(False)
"""
END = """
assert not any(name.partition(".")[0] == "kiloword" for name in sys.modules)
np.savez(out + ".npz", images=np.asarray(images), texts=np.asarray(words))
"""
USES = {
    "open_clip": """
import open_clip
model = open_clip.create_model("local-dir:" + out).eval()
images = F.normalize(model.encode_image(pixels), dim=-1)
words = F.normalize(model.encode_text(open_clip.get_tokenizer("local-dir:" + out)(texts)), dim=-1)
""",
    "torch": """
from transformers import AutoTokenizer
ids = AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt")
(images,) = torch.export.load(out + "/image.pt2").module()(pixel_values=pixels)
text = torch.export.load(out + "/text.pt2").module()
(words,) = text(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"])
""",
    "onnx": """
import onnxruntime
from transformers import AutoTokenizer
ids = AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="np")
(images,) = onnxruntime.InferenceSession(out + "/image.onnx").run(None, {"pixel_values": pixels.numpy()})
names = ("input_ids", "attention_mask")
(words,) = onnxruntime.InferenceSession(out + "/text.onnx").run(None, {n: ids[n].astype("int64") for n in names})
""",
    "immich": """
import json, onnxruntime
from tokenizers import Tokenizer
config, said = (json.load(open(out + name)) for name in ("/config.json", "/textual/tokenizer_config.json"))
tokenizer, length = Tokenizer.from_file(out + "/textual/tokenizer.json"), config["text_cfg"]["context_length"]
tokenizer.enable_padding(length=length, pad_token=said["pad_token"], pad_id=tokenizer.token_to_id(said["pad_token"]))
tokenizer.enable_truncation(max_length=length)
session = onnxruntime.InferenceSession(out + "/textual/model.onnx")
ids = [tokenizer.encode(" ".join(text.split())).ids for text in texts]
words = [session.run(None, {"text": np.array([one], np.int32)})[0][0] for one in ids]
shown = json.load(open(out + "/visual/preprocess_cfg.json"))
raw = np.load(out + ".uint8.npy").astype(np.float32) / 255
given = ((raw - np.float32(shown["mean"])) / np.float32(shown["std"])).transpose(0, 3, 1, 2)
session = onnxruntime.InferenceSession(out + "/visual/model.onnx")
images = [session.run(None, {"image": one[None]})[0][0] for one in given]
""",
    "sentence-transformers": """
from PIL import Image
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(out, device="cpu")
words = model.encode(texts)
images = model.encode([Image.fromarray(x) for x in np.load(out + ".uint8.npy")])
""",
}
LIBRARIES = {
    "open_clip": ("open_clip", "transformers"),
    "torch": ("transformers",),
    "onnx": ("onnxruntime", "onnxscript", "transformers"),
    "immich": ("onnxruntime", "onnxscript"),
    "sentence-transformers": ("sentence_transformers",),
}


def saved(out: Path, config: ModelConfig, tokenizer: Tokenizer, method: str) -> Path:
    text = replace(config.text, vocab=tokenizer.vocab, special=tokenizer.roles.ids())
    file = ModelFile(method=method, settings={}, model=replace(config, text=text), size="debug")
    save_model(out, build(file.model, preset(method), seed=1), tokenizer, file)
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "vocabulary"),
    [
        ("open_clip", "own"),
        ("onnx", "clip"),
        ("torch", "own"),
        ("immich", "own"),
        ("immich", "clip"),
        ("sentence-transformers", "clip"),
    ],
)
def test_the_target_computes_the_features_of_the_source(target: str, vocabulary: str, tmp_path: Path) -> None:
    torchvision_ready()
    for name in LIBRARIES[target]:
        pytest.importorskip(name, reason=f"{target} needs {name}")
    source = tmp_path / "m"
    if vocabulary == "own":
        model_folder(source)
    else:
        saved(source, sizes()["debug"], clip_tokenizer_from([]), "clip")
    out = tmp_path / "out"
    main(["export", target, str(source), "--out", str(out)])
    assert (out / "README.md").is_file()
    modes = {path.name: path.stat().st_mode for path in out.rglob("*") if path.is_file()}
    assert set(modes.values()) == {(source / "config.json").stat().st_mode}, modes
    ours, size = kiloword.load(source), 32
    pixels = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    np.save(f"{out}.pixels.npy", ours.model.normalise(pixels).numpy())
    np.save(f"{out}.uint8.npy", pixels.permute(0, 2, 3, 1).numpy())
    places = [p for p in sys.path if p and not (Path(p) / "kiloword").is_dir()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    code = BEGIN + USES[target] + END
    subprocess.run([sys.executable, "-c", code, str(out)], env=env, cwd=tmp_path, check=True, capture_output=True)
    theirs = np.load(f"{out}.npz")
    for kind, expected in (("images", ours.encode_image(pixels)), ("texts", ours.encode_text(TEXTS))):
        np.testing.assert_allclose(theirs[kind], expected["vec"].numpy(), atol=LIMIT, rtol=0)


def test_the_printed_line_lets_open_clip_be_imported_beside_another_torch(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    line = re.search(r"^ +(from .*\(\))$", capsys.readouterr().out, re.MULTILINE)
    if line is None or find_spec("open_clip") is None:
        pytest.skip("torchvision fits this torch, or open_clip is not installed")
    subprocess.run([sys.executable, "-c", f"{line[1]}\nimport open_clip"], check=True, capture_output=True)


@pytest.mark.parametrize("text_pool", ["last", "mean", "max"])
@pytest.mark.parametrize("method", ["siglip", "prolip", "llip"])  # prolip has a token after the words
def test_padded_texts_pool_as_packed_ones(text_pool: TextPool, method: str, tmp_path: Path) -> None:
    source = Exported.of(str(model_folder(tmp_path / "m", method, text_pool=text_pool)), NONE)
    ids = graphs.padded_ids(source)
    assert len(set(ids["attention_mask"].sum(1).tolist())) > 1
    with torch.no_grad():
        (vectors,) = graphs.TextGraph(source.model, ("vec",)).eval()(**ids)
    torch.testing.assert_close(vectors, source.texts["vec"], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "text_pool"), [("prolip", None), ("llip", "mean"), ("siglip", "max")])
def test_torch_takes_models_that_are_no_clip(
    method: str, text_pool: TextPool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_folder(tmp_path / "m", method, text_pool=text_pool)
    main(["export", "torch", str(source), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert ("log_var" in said, "Scores: " in said) == (method == "prolip", method == "llip")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("fp16", 0.005), ("int8", 0.1)])
def test_onnx_of_lower_precision_tells_its_difference(
    precision: str, limit: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LIBRARIES["onnx"]:
        pytest.importorskip(name, reason=f"onnx needs {name}")
    out = tmp_path / "out"
    main(["export", "onnx", str(model_folder(tmp_path / "m")), "--out", str(out), "--precision", precision])
    told = re.findall(
        rf"(\w+)\.onnx at batches 1, 3, 5, {precision}: largest difference ([\d.e-]+)", capsys.readouterr().out
    )
    assert [name for name, _ in told] == ["image", "text"]
    assert all(LIMIT < float(difference.rstrip(".")) < limit for _, difference in told)
    assert {path.name for path in out.glob("*.onnx*")} == {"image.onnx", "text.onnx"}
    assert not [path for path in out.iterdir() if path.is_dir()]
    assert precision in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("method", "target", "flags", "word"),
    [
        ("prolip", "open_clip", (), "Gaussians; image.uncertainty_token is True"),
        ("prolip", "transformers", (), "onnx"),
        ("half a siglip", "transformers", (), "head.image_pool"),
        ("a clip with a margin", "immich", (), "the 32 pixels that it crops, this model to 40"),
        ("filip", "onnx", (), "every word of a text"),
        ("siglip+maxsim", "torch", (), "safetensors takes its weights"),
        ("siglip", "torch", ("--precision", "int8"), "--precision int8 is for onnx"),
    ],
)
def test_what_a_target_cannot_express_is_named_and_leaves_nothing(
    method: str, target: str, flags: tuple[str, ...], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    config = sizes()["debug"]
    unusual = {"a clip with a margin": replace(config, preprocess=replace(config.preprocess, resize=40))}
    unusual["half a siglip"] = replace(config, head=replace(config.head, image_pool="map"))  # but texts without pads
    if method in unusual:
        saved(tmp_path / "m", unusual[method], Tokenizer.train(TEXTS, vocab=300), "siglip")
    else:
        model_folder(tmp_path / "m", method)
    assert word in refused(capsys, "export", target, tmp_path / "m", "--out", tmp_path / "out", *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("difference", [2 * LIMIT, float("nan")])
def test_a_difference_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="differs from the source"):
        check_close("features", difference)


def test_weights_fill_an_empty_folder_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a mount point, the target of a link, or the folder of the shell: it stays the same folder."""
    source, out, link = model_folder(tmp_path / "m"), tmp_path / "out", tmp_path / "link"
    own = load_model(source)[0].state_dict()
    out.mkdir()
    link.symlink_to(out)
    before = out.stat().st_ino
    monkeypatch.chdir(out)
    for place in (".", str(link)):
        main(["export", "safetensors", str(source), "--out", place])
        weights = load_file(out / "weights.safetensors")
        assert all(torch.equal(value, weights[name]) for name, value in own.items())
        assert (out.stat().st_ino, link.is_symlink()) == (before, True)
        refused(capsys, "export", "safetensors", source, "--out", place)
        others = {path.name for path in out.iterdir()} - {"weights.safetensors"}
        assert others == {"README.md", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
        for path in out.iterdir():
            path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["open_clip", "transformers", "sentence-transformers"])
def test_an_export_comes_back(target: str, tmp_path: Path) -> None:
    """With kiloword's own vocabulary, whose tokenizer.json names its special tokens."""
    torchvision_ready()
    for name in LIBRARIES.get(target, ("transformers",)):
        pytest.importorskip(name, reason=f"{target} needs {name}")
    source = model_folder(tmp_path / "m", "clip")
    main(["export", target, str(source), "--out", str(tmp_path / "out")])
    ours, back = kiloword.load(source), kiloword.load(f"hf:{tmp_path / 'out'}")
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(back.encode_image(pixels)["vec"], ours.encode_image(pixels)["vec"], atol=1e-6, rtol=0)
    torch.testing.assert_close(back.encode_text(TEXTS)["vec"], ours.encode_text(TEXTS)["vec"], atol=1e-6, rtol=0)


def test_weights_are_mapped_back() -> None:
    """Joined queries, keys and values, a transposed projection, flattened patches: by hand."""
    layer, joined = "text_model.encoder.layers.0.self_attn", "text_tower.blocks.0.attention.qkv.weight"
    names = [f"{layer}.{kind}_proj.weight" for kind in "qkv"]
    theirs = {n: torch.empty(2, 2) for n in names} | {"visual.proj": torch.empty(2, 3)}
    theirs |= {"visual.conv1.weight": torch.empty(1, 3, 2, 1), "logit_scale": torch.empty(())}
    ours = {joined: torch.arange(12.0).reshape(6, 2), "head.log_scale": torch.tensor([7.0])}
    ours["head.pooling.image_projection.weight"] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ours["image_tower.patches.weight"] = torch.arange(6.0)[None]
    back = inverted(theirs, ours)
    assert [back[name].tolist() for name in names] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert back["visual.proj"].tolist() == [[1, 3, 5], [2, 4, 6]]
    assert back["visual.conv1.weight"].tolist() == [[[[0], [1]], [[2], [3]], [[4], [5]]]]
    assert back["logit_scale"].tolist() == 7
    with pytest.raises(ValueError, match="no weights for c"):
        inverted({"c": torch.empty(1)}, ours)


# Push: which files a hub gets, in which commit; what is pushed is what `load` reads back


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
    for name in ("data.tar", "secret.json", "old.safetensors", ".cache/x/y.json", "notes/config.json"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    assert "truncated" not in capsys.readouterr().err
    (tmp_path / "out" / "link.json").symlink_to(tmp_path / "m" / "config.json")
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "- `link.json`\n- `../m/config.json`\n")
    main(["push", str(tmp_path / "out"), "me/model"])
    words = {"README.md", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "weights.safetensors"}
    assert set(hub.files) == words
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
