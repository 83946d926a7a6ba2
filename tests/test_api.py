"""Matcher: images and strings in, features and scores out; show, move, halve, pickle, save; Gaussians; refusals."""

from __future__ import annotations

import io
import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from kiloword.api import Matcher
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.device import choose
from kiloword.evaluation import evaluate
from kiloword.methods.prolip import gaussian
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Features

CAPTIONS = ["a red circle", "two blue squares", "<b>bold</b> & \x1b[31m"]
TOKENIZER = Tokenizer.train(CAPTIONS, 300)


def made(method: str = "siglip") -> Matcher:
    return Matcher(build(sizes()["debug"], preset(method), seed=0), TOKENIZER, preset(method))


@pytest.fixture
def matcher() -> Matcher:
    return made()


def photo(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(folder: Path, method: str = "siglip") -> Path:
    model = made(method).model
    save_model(folder, model, TOKENIZER, ModelFile(method=method, settings={}, model=model.config, data="scenes"))
    return folder


def test_every_form_of_an_image_is_the_same(matcher: Matcher, tmp_path: Path) -> None:
    images = [photo(0), photo(1, 60, 33)]
    paths = [tmp_path / "a.png", str(tmp_path / "b.webp")]
    images[0].save(paths[0])
    images[1].save(paths[1], lossless=True)
    images[0].save(file := io.BytesIO(), "PNG")
    raw = file.getvalue()
    arrays = [np.asarray(image) for image in images]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    floats = [tensors[0].float() / 255, tensors[1].double() / 255]
    expected = matcher.encode_image(torch.stack([matcher.preprocess(path) for path in paths]))["vec"]
    torch.testing.assert_close(expected.norm(dim=1), torch.ones(2))
    for several in (images, paths, arrays, tensors, floats, [raw, floats[1]], tuple(images)):
        torch.testing.assert_close(matcher.encode_image(several)["vec"], expected)
    for one in (images[0], paths[0], raw, bytearray(raw), arrays[0], arrays[0] / 255, tensors[0]):
        torch.testing.assert_close(matcher.encode_image(one)["vec"], expected[0])
    for stack in (arrays[0][None], tensors[0][None], floats[0][None]):
        torch.testing.assert_close(matcher.encode_image(stack)["vec"], expected[:1])
    text = matcher.encode_text(CAPTIONS)["vec"]
    assert torch.equal(matcher.encode_text(CAPTIONS[0])["vec"], matcher.encode_text(CAPTIONS[:1])["vec"][0])
    torch.testing.assert_close(matcher.encode_text(CAPTIONS, batch=1)["vec"], text)
    torch.testing.assert_close(matcher.encode_image(images, batch=1)["vec"], expected)
    layer = photo(0).convert("RGBA")
    layer.putalpha(Image.new("L", layer.size, 100))
    for mode, image in (("RGBA", layer), ("P", photo(1).convert("P")), ("L", photo(2).convert("L"))):
        image.save(tmp_path / f"{mode}.png")
        both = (matcher.encode_image(one)["vec"] for one in (image, tmp_path / f"{mode}.png"))
        torch.testing.assert_close(*both)


WRONG: list[tuple[Any, str]] = [  # images, what the refusal says
    (3, "int"),
    (iter([photo(0)]), "list"),
    ([], "no images"),
    (torch.zeros(0, 3, 32, 32), "no images"),
    ([photo(0), 3], "image 1"),
    (torch.zeros(3, 32, 32) + 1.5, "image 0 .* 1.5"),
    (torch.full((3, 8, 8), torch.nan), "nan"),
    (torch.zeros(3, 8, 8, dtype=torch.int64), r"torch.int64 tensor \[3, 8, 8\]"),
    (torch.zeros(8, 8, 3), r"torch.float32 tensor \[8, 8, 3\]"),
    (np.zeros((8, 8, 3), np.int32), r"int32 array \[8, 8, 3\]"),
    (np.full((8, 8, 3), 255.0), "float64 .* 255"),
    (np.zeros((8, 8), np.uint8), r"uint8 array \[8, 8\]"),
    (b"nothing like an image", "image 0"),
    ("https://name:pw@example.org/a.jpg", "https://example.org/a.jpg"),
    ([Image.new("F", (8, 8))], "floating-point"),
    (["no/such/image.png"], "no/such/image.png"),
    (Path(__file__), r"test_api\.py"),
]


def test_wrong_arguments_are_refused(matcher: Matcher, tmp_path: Path) -> None:
    texts, folder = matcher.encode_text(CAPTIONS), saved(tmp_path)
    nan = {**texts, "vec": texts["vec"].clone()}
    nan["vec"][1, 0] = float("nan")
    matcher.model.train()
    for images, word in WRONG:
        with pytest.raises(ValueError, match=word):
            matcher.encode_image(images)
        assert matcher.model.training
    for call, word in (
        (lambda: matcher.encode_text([]), "no texts"),
        (lambda: matcher.encode_text(["a", 1]), "text 1"),  # type: ignore[list-item]
        (lambda: matcher.encode_text(3), "int"),  # type: ignore[arg-type]
        (lambda: matcher.encode_image(photo(0), batch=0), "batch"),
        (lambda: matcher.score(texts, nan), "image 0 with text 1 is nan"),
        (lambda: matcher.score_pairs(nan, texts), "image 1 with text 1 is nan"),
        (lambda: matcher.score_pairs(texts, matcher.encode_text("a")), "3 images and 1 texts"),
        (lambda: matcher.score({}, CAPTIONS), "vec"),
        (lambda: matcher.score({"vec": np.ones((2, 16))}, texts), "vec"),  # type: ignore[dict-item]
        (lambda: matcher.score({"vec": torch.ones(2, 7)}, texts), "7 and of 16"),
        (lambda: matcher.score(texts, texts, "near"), "near"),  # type: ignore[arg-type]
        (lambda: matcher.class_features("circle"), "list"),
        (lambda: matcher.show(photo(0), CAPTIONS, torch.ones(1, 1)), r"\[1, 1\].*\[1, 3\]"),
        (lambda: matcher.to("tpu"), "cuda"),
        (lambda: matcher.save(tmp_path / "other"), "model folder"),
        (lambda: kiloword.load(folder).save(folder), "exists"),
        (lambda: kiloword.load(folder, size=5), "patch"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def test_scores_and_classes_are_those_of_the_definition(matcher: Matcher) -> None:
    photos, names = [photo(i) for i in range(4)], ["circle", "square"]
    images, texts = matcher.encode_image(photos), matcher.encode_text(CAPTIONS)
    torch.testing.assert_close(matcher.score(images, texts), images["vec"] @ texts["vec"].T)
    torch.testing.assert_close(matcher.score(photos, CAPTIONS), images["vec"] @ texts["vec"].T)
    written, rows = ["a {c}", "one {c}."], []
    for name in names:  # the mean of a class's unit vectors, scaled to norm 1
        mean = matcher.encode_text([f"a {name}", f"one {name}."])["vec"].mean(0)
        rows.append(mean / mean.norm())
    scale, bias = matcher.model.head.log_scale.exp(), matcher.model.head.bias
    expected = (scale * images["vec"] @ torch.stack(rows).T + bias).softmax(1).detach()
    functions: Any = [lambda c: f"a {c}", lambda c: f"one {c}."]  # as open_clip writes them
    for templates in (written, functions, {name: [f"a {name}", f"one {name}."] for name in names}):
        torch.testing.assert_close(matcher.classify(photos, names, templates), expected)
    torch.testing.assert_close(matcher.classify(images, matcher.class_features(names, written)), expected)


@pytest.mark.parametrize("method", ["llip", "prolip"])
def test_all_else_takes_one_item_as_a_list_of_one(method: str) -> None:
    matcher, image, caption = made(method), photo(0), CAPTIONS[0]
    one, texts, text = matcher.encode_image(image), matcher.encode_text(CAPTIONS), matcher.encode_text(caption)
    score = matcher.score([image], CAPTIONS)
    for images, captions in ((image, CAPTIONS), (one, texts)):
        torch.testing.assert_close(matcher.score(images, captions), score)
    torch.testing.assert_close(matcher.score(image, caption), score[:, :1])
    torch.testing.assert_close(matcher.score_pairs(one, text), score[0, :1])
    torch.testing.assert_close(matcher.classify(image, ["a", "b"]), matcher.classify([image], ["a", "b"]))
    torch.testing.assert_close(matcher.explain(image, caption).maps, matcher.explain([image], [caption]).maps)
    assert matcher.pixels(image).shape == (1, 3, 32, 32)
    if method == "prolip":
        for value in (matcher.distance(one, texts), matcher.inclusion(one, texts), matcher.includes(one, texts)):
            assert value.shape == (1, 3)
        assert matcher.uncertainty(text).shape == (1,)


def test_what_a_person_sees(matcher: Matcher) -> None:
    said = repr(made("sycoca"))
    for part in ("sycoca", "32 x 2 / 2", "32 pixels", "text decoder", " M", "cpu"):
        assert part in said, part
    features = made("prolip").encode_image([photo(0), photo(1)])
    assert repr(features) == "Features(vec [2, 16], log_var [2, 16])"
    torch.save(features, file := io.BytesIO())
    file.seek(0)
    torch.testing.assert_close(dict(torch.load(file, weights_only=True)), dict(features))
    table = matcher.show([photo(0), photo(1)], CAPTIONS)
    html, text = table._repr_html_(), repr(table)
    assert html.count('<img src="data:image/') == 2
    assert html.count("<b>") == 2  # the best of each image, nothing of a caption
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; \\x1b[31m" in html
    for shown in (html, text):
        assert "\x1b" not in shown
        assert "image 1" in shown
        assert f"{table.scores[1, 2]:.3f}" in shown
    long = matcher.show([photo(n) for n in range(23)], [f"text {n}" for n in range(12)])
    for shown in (long._repr_html_(), repr(long)):
        assert "23 images, 12 texts" in shown
    assert "0.500" in repr(matcher.show(photo(1), ["a"], [[0.5]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["clip", "siglip", "llip", "prolip", "sycoca"])
def test_a_model_is_loaded_pickled_halved_and_saved(method: str, tmp_path: Path) -> None:
    photos, folder = [photo(0), photo(1)], saved(tmp_path / "model", method)
    (folder / "README.md").write_text("# A card\n")
    model, expected = kiloword.load(folder), made(method).score(photos, CAPTIONS)
    for again in (model, pickle.loads(pickle.dumps(model)), kiloword.load(model.save(tmp_path / "again"))):
        assert torch.equal(again.score(photos, CAPTIONS), expected)
        assert (again.method.name, again.card) == (method, "# A card\n")
        assert again.file == replace(model.file, model=model.model.config)  # type: ignore[type-var]
    near = kiloword.load(folder, dtype="bf16").score(photos, CAPTIONS)
    assert near.dtype == torch.float32
    torch.testing.assert_close(near, expected, atol=0.03, rtol=0)
    size = sum(p.nbytes for p in model.model.parameters())
    assert sum(p.nbytes for p in model.half().model.parameters()) == size / 2
    for half in (model, kiloword.load(model.save(tmp_path / "half"))):
        torch.testing.assert_close(half.score(photos, CAPTIONS), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("method", ["siglip", "llip", "siglip+matryoshka"])
def test_a_model_that_was_changed_gets_a_card_of_its_own(tmp_path: Path, method: str) -> None:
    folder, dim = saved(tmp_path / "model", method), 8 if "siglip" in method else None
    (folder / "README.md").write_text("Images of 32 pixels\n")
    model = kiloword.load(folder, dim=dim, size=64, context=30)
    card = kiloword.load(model.save(tmp_path / "out")).card
    assert "Images of 64 pixels (resize: shortest), texts of at most 30 tokens" in card
    assert "image.size is 64 instead of 32" in card
    assert ("head.dim is 8" in card) == (dim is not None)
    (folder / "README.md").unlink()
    assert kiloword.load(kiloword.load(folder, size=64).save(tmp_path / "plain")).card == ""


def test_another_size_interpolates_positions_and_squash_keeps_the_whole_image(tmp_path: Path) -> None:
    larger, smooth = kiloword.load(saved(tmp_path), size=64), Image.linear_gradient("L").convert("RGB")
    assert larger.preprocess(photo(0)).shape == (3, 64, 64)
    near = torch.cosine_similarity(larger.encode_image([smooth])["vec"], made().encode_image([smooth])["vec"])
    assert near.item() > 0.9
    assert torch.equal(larger.encode_text(CAPTIONS)["vec"], made().encode_text(CAPTIONS)["vec"])
    wide = Image.new("RGB", (96, 32))
    wide.paste((255, 0, 0), (0, 0, 16, 32))  # a stripe that a centre crop loses
    config = sizes()["debug"]
    squashed = replace(config, preprocess=replace(config.preprocess, resize="squash"))
    assert Matcher(build(squashed, preset("clip")), TOKENIZER).preprocess(wide)[0].max() == 255
    assert Matcher(build(config, preset("clip")), TOKENIZER).preprocess(wide)[0].max() == 0


def test_devices(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matcher.to(torch.device("cpu")) is matcher
    for there, cuda, expected in ((False, False, "cpu"), (True, False, "mps"), (True, True, "cuda")):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert choose("auto", mps=True) == expected
        assert choose("auto") == ("cuda" if cuda else "cpu")  # of training, which nobody tried there
    with pytest.raises(ValueError, match="'mps': expected auto, cpu, cuda or cuda:N"):
        choose("mps")


def test_a_gpu_that_is_full_gets_half_the_batch(matcher: Matcher) -> None:
    images, tried = [photo(n) for n in range(7)], []
    expected = matcher.encode_image(images)["vec"]

    def full(tower: Any, given: Any) -> None:
        tried.append(len(given[0]))
        if len(given[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    matcher.model.image_tower.register_forward_pre_hook(full)
    torch.testing.assert_close(matcher.encode_image(images)["vec"], expected)
    assert tried == [7, 3, 3, 1]
    with pytest.raises(torch.OutOfMemoryError):
        matcher.encode_image(images, batch=7)  # as asked for


def test_progress_shows_in_notebooks_and_where_it_is_asked_for(
    matcher: Matcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(**progress: bool) -> str:
        matcher.encode_image([photo(0), photo(1)], batch=1, **progress)
        return capsys.readouterr().err

    monkeypatch.setattr("kiloword.terminal.progress.LIVE_EVERY_S", 0.0)
    monkeypatch.setattr("kiloword.terminal.progress.PLAIN_EVERY_S", 0.0)
    assert drawn() == ""
    assert "images 100%" in drawn(progress=True)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert "images 100%" in drawn()
    assert drawn(progress=False) == ""


# Gaussians


def photos(n: int) -> torch.Tensor:
    return torch.randint(256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def at(cosine: float, log_var: float, dim: int = 16) -> Features:
    """One Gaussian whose mean has this cosine with the first axis, equally wide in all dimensions."""
    vec = torch.zeros(1, dim)
    vec[0, :2] = torch.tensor([cosine, (1 - cosine**2) ** 0.5])
    return {"vec": vec, "log_var": torch.full((1, dim), log_var)}


@pytest.mark.parametrize("method", ["prolip", "pcme++", "llip+gaussian"])
def test_either_side_in_either_side(method: str) -> None:
    m = made(method)
    images, texts = m.encode_image(photos(4)), m.encode_text(CAPTIONS)
    for a in (images, texts):
        torch.testing.assert_close(m.uncertainty(a), a["log_var"].exp().sum(1))
        for b in (images, texts):
            h, distance = m.inclusion(a, b), m.distance(a, b)
            assert h.shape == distance.shape == (len(a["vec"]), len(b["vec"]))
            torch.testing.assert_close(h, -m.inclusion(b, a).T)
            torch.testing.assert_close(distance, m.distance(b, a).T)
            for i in range(len(a["vec"])):
                one = {k: v[[i]].expand_as(b[k]) for k, v in a.items() if k in ("vec", "log_var")}
                torch.testing.assert_close(h[i], gaussian.inclusion(one, b).sum(1))
                torch.testing.assert_close(distance[i], gaussian.csd(one, b))
            assert torch.equal(m.includes(a, b, overlap=9.0), h > 0)
            assert not m.includes(a, b, overlap=0.0).any()
            assert not (m.includes(a, b, overlap=9.0) & m.includes(b, a, overlap=9.0).T).any()
    if method == "prolip":
        torch.testing.assert_close(m.score(images, texts), 1 - m.distance(images, texts) / 2)
    none = {name: value[:0] for name, value in texts.items()}
    assert m.uncertainty(none).shape == (0,)
    assert m.distance(none, texts).shape == m.inclusion(none, texts).shape == (0, 3)


def test_inclusion_needs_overlap_and_its_forms_differ() -> None:
    """H is larger the farther a narrow Gaussian is from a wide one; `includes` asks for overlap. Of the last two, the
    wider in most dimensions by the paper is the narrower by the integral."""
    m, narrow, wide, far = made("prolip"), at(1.0, -6.0), at(1.0, -4.0), at(-1.0, -6.0)
    assert float(m.inclusion(far, wide)) > float(m.inclusion(narrow, wide)) > 0
    for form in ("paper", "exact"):
        assert m.includes(narrow, wide, overlap=1.0, form=form).item()
        assert not m.includes(wide, narrow, overlap=1.0, form=form).item()
        assert not m.includes(far, wide, overlap=1.0, form=form).item()
    assert m.includes(far, wide, overlap=5.0).item()
    a = {"vec": torch.zeros(1, 2), "log_var": torch.tensor([[-1.0, 1.0]])}
    b = {"vec": torch.tensor([[0.0, 7.0]]), "log_var": torch.tensor([[4.0, 0.0]])}
    assert float(m.inclusion(a, b)) > 0 > float(m.inclusion(a, b, form="exact"))
    assert m.includes(a, b, overlap=1e3).item()
    assert not m.includes(a, b, overlap=1e3, form="exact").item()


@pytest.mark.parametrize("method", ["prolip", "pcme++"])
def test_overlap_is_what_the_model_calls_a_match(method: str) -> None:
    """Images at all cosines within one wide text: included exactly where the match's probability is above 1/2."""
    m = made(method)
    head = m.model.head
    assert head.bias is not None
    with torch.no_grad():
        head.log_scale.fill_(2.5)
        head.bias.fill_(-5.0 if method == "prolip" else 12.0)
    parts = [at(0.05 * n, -6.0) for n in range(21)]
    images = {k: torch.cat([part[k] for part in parts]) for k in ("vec", "log_var")}
    text = at(1.0, -5.0)
    found = m.includes(images, text)[:, 0]
    with torch.inference_mode():
        likely = head.logits(m.score(images, text)).sigmoid()[:, 0] > 0.5
    assert torch.equal(found, likely)
    assert 3 < int(found.sum()) < 18


WRONG_FEATURES: list[tuple[Any, str]] = [
    (["a dog"], "vec"),
    ({"log_var": torch.zeros(2, 16)}, "vec"),
    ({"vec": torch.zeros(2, 16)}, r"log_var.*\+gaussian"),
    ({"vec": torch.zeros(2, 16), "log_var": torch.zeros(1, 16)}, "log_var"),
    ({"vec": torch.zeros(1, 2, 16), "log_var": torch.zeros(1, 2, 16)}, "vec"),
    (at(1.0, -5.0, dim=4), "dimensions"),
]


def test_what_are_no_features_of_this_model_is_refused() -> None:
    m, softmax, good = made("prolip"), made("clip+gaussian"), at(1.0, -5.0)
    for given, word in WRONG_FEATURES:
        for measure in (m.distance, m.inclusion, m.includes):
            for a, b in ((given, good), (good, given)):
                with pytest.raises(ValueError, match=word):
                    measure(a, b)
    with pytest.raises(ValueError, match="printed"):
        m.inclusion(good, good, form="printed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="softmax"):  # which learned no overlap
        softmax.includes(good, good)
    assert softmax.includes(good, good, overlap=1.0).shape == (1, 1)


def literal_csd(a: Features, b: Features, i: int, j: int) -> float:
    """Eq. 1, dimension by dimension, in double precision."""
    pairs = zip(a["vec"][i].tolist(), b["vec"][j].tolist(), strict=True)
    variances = [math.exp(x) for x in (*a["log_var"][i].tolist(), *b["log_var"][j].tolist())]
    return sum((x - y) ** 2 for x, y in pairs) + sum(variances)


def test_nearest_is_the_literal_distance_or_the_cosine() -> None:
    m = made("pcme++")
    images, texts = m.encode_image(photos(4)), m.encode_text(CAPTIONS)
    images["log_var"], texts["log_var"] = torch.randn(4, 16) - 3, torch.randn(3, 16) - torch.tensor([[1.0], [5], [3]])
    by_distance, by_cosine = m.score(images, texts, "csd"), m.score(images, texts, "cosine")
    for i in range(4):
        for t in range(3):
            assert float(by_distance[i, t]) == pytest.approx(1 - literal_csd(images, texts, i, t) / 2, abs=1e-5)
            cosine = sum(x * y for x, y in zip(images["vec"][i].tolist(), texts["vec"][t].tolist(), strict=True))
            assert float(by_cosine[i, t]) == pytest.approx(cosine, abs=1e-5)
    assert not torch.equal(by_distance.argsort(1), by_cosine.argsort(1))  # variances matter here
    first = {name: value[:3] for name, value in images.items()}
    for nearest, whole in (("csd", by_distance), ("cosine", by_cosine), (None, m.score(images, texts))):
        torch.testing.assert_close(m.score_pairs(first, texts, nearest), whole[:3].diagonal())  # type: ignore[arg-type]


def test_retrieval_ranks_by_what_is_chosen() -> None:
    m, found = made("prolip"), {}
    drawn = torch.Generator().manual_seed(0)  # ranks of near ties differ by rounding between the two scores
    with torch.no_grad():
        m.model.head.uncertainty.text_log_var.weight.normal_(0, 2, generator=drawn)  # type: ignore[union-attr, operator]
        m.model.head.uncertainty.text_log_var.bias.fill_(-3)  # type: ignore[union-attr, operator]
    for nearest in (None, "cosine", "csd"):
        found[nearest] = evaluate(m, "retrieval", "scenes:test?n=12", nearest=nearest)
    assert found["csd"] == found[None] != found["cosine"]  # the score of prolip is 1 - CSD / 2
    listed = evaluate(m, "retrieval", "scenes:test?n=12", nearest="cosine", shortlist=99)
    assert {name: listed[name] for name in found["cosine"]} == pytest.approx(found["cosine"])
    for method, nearest, word in (("prolip", "near", "near"), ("siglip", "csd", "log_var")):
        with pytest.raises(ValueError, match=word):
            evaluate(made(method), "retrieval", "scenes:test?n=12", nearest=nearest)
