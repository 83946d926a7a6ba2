"""Codes against loops over numbers; libraries of codes and of the first numbers of vectors; what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.apps.search import index, nearest, rank
from kiloword.apps.search.codes import BinaryCodes, CodeKind, Int8Codes, StoredKind, code_bytes, first, quantised, signs
from kiloword.apps.search.index import opened_for
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import Ranker
from kiloword.apps.search.site import Site
from photo_folders import draw, photos_in, refused

KINDS: list[tuple[CodeKind, StoredKind]] = [("int8", "fp16"), ("int8", "none"), ("binary", "fp16"), ("binary", "int8")]
TEXT = "two cats and a dog"


def drawn(n: int, dim: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(dim)
    return (F.normalize(torch.randn(m, dim, generator=random), dim=1) for m in (n, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("dim", [1, 5, 16, 65, 512])
def test_binary_codes_count_the_bits_that_differ(dim: int) -> None:
    vec, query = drawn(9, dim)
    codes = BinaryCodes(signs(vec), dim)
    differ = [sum(bool(a > 0) != bool(b > 0) for a, b in zip(row, query[0], strict=True)) for row in vec]
    expected = [1 - 2 * number / dim for number in differ]
    assert codes.scores(query[0]).tolist() == pytest.approx(expected, abs=1e-6)
    assert signs(vec).shape == (9, code_bytes("binary", dim))
    assert (signs(codes.vectors(list(range(9)))) == signs(vec)).all()


@pytest.mark.parametrize("dim", [1, 5, 16, 65, 512])
def test_int8_codes_are_sums_of_whole_numbers(dim: int) -> None:
    vec, query = drawn(9, dim)
    codes = Int8Codes(*quantised(vec))
    scale = [max(abs(float(row[d])) for row in vec) / 127 for d in range(dim)]
    whole = [[round(float(row[d]) / scale[d]) for d in range(dim)] for row in vec]
    weighted = [float(query[0, d]) * scale[d] for d in range(dim)]
    step = max(map(abs, weighted)) / 127
    expected = [step * sum(a * round(b / step) for a, b in zip(row, weighted, strict=True)) for row in whole]
    assert codes.scores(query[0]).tolist() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(codes.vectors([2, 7]), vec[[2, 7]], atol=max(scale) * 0.51, rtol=0)


def test_zeros_have_codes() -> None:
    codes = Int8Codes(*quantised(torch.zeros(2, 3)))
    assert codes.scores(torch.zeros(3)).tolist() == [0, 0]


@pytest.mark.parametrize("levels", [1, 3, 40])
def test_equal_scores_keep_the_order_of_the_library(levels: int) -> None:
    """However many photos are wanted: those of a short list begin a long one."""
    scores = torch.randint(levels, (200,), generator=torch.Generator().manual_seed(levels)).float()
    scores[5] = -torch.inf
    order = [n for n in sorted(range(200), key=lambda n: -float(scores[n])) if n != 5]
    for top in (*range(1, 60), 199, 200, 300):
        values, places = rank._best(scores, top)
        assert places.tolist() == order[:top]
        assert values.tolist() == scores[order[:top]].tolist()
    assert rank._best(scores, 0)[1].tolist() == rank._best(scores[:0], 3)[1].tolist() == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("codes")
    model_folder(root / "model", "siglip+matryoshka")
    photos_in(root / "photos", 30)
    return root


def made(root: Path, name: str, **options: Any) -> tuple[Library, Matcher]:
    index.main(root / "photos", str(root / "model"), root / name, device="cpu", **options)
    library = Library(root / name)
    return library, opened_for(library, None, "cpu", "fp32")


@pytest.fixture(scope="module")
def exact(root: Path) -> tuple[Library, Matcher]:
    return made(root, "float")


def rows(library: Library, matcher: Matcher, rescore: int | None, top: int = 5) -> list[tuple[str, float]]:
    hits = Ranker(library, matcher, rescore).by_text(TEXT, top)
    return [(library.path(hit.row), hit.score) for hit in hits]


@pytest.mark.parametrize(("codes", "vectors"), KINDS)
def test_a_library_of_codes_finds_what_the_vectors_find(
    root: Path, exact: tuple[Library, Matcher], codes: CodeKind, vectors: StoredKind
) -> None:
    library, matcher = made(root, f"{codes}-{vectors}", codes=codes, vectors=vectors)
    expected = rows(*exact, None)
    assert library.parts[0].vec.shape == (30, 16)
    if vectors != "none":  # six times the five best are all 30 photos
        found = rows(library, matcher, 6)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=5e-3)
        if vectors == "fp16":
            assert [path for path, _ in found] == [path for path, _ in expected]
    vec = matcher.encode_text(TEXT)["vec"]
    near = torch.cat([part.codes.scores(vec) for part in library.parts])
    listed = {library.path(row) for row in near.topk(10).indices.tolist()}
    assert {path for path, _ in rows(library, matcher, 0, 10)} == listed
    if vectors != "none":
        assert {path for path, _ in rows(library, matcher, 2)} <= listed


def test_files_hold_codes_and_not_the_vectors(root: Path) -> None:
    library, _ = made(root, "files", codes="binary")
    table = pq.read_table(root / "files/part-000001.parquet")
    assert "vec" not in table.column_names
    code = np.stack([np.frombuffer(one, np.uint8) for one in table["code"].to_pylist()])
    assert (code == signs(library.parts[0].vec)).all()
    assert (root / "files/part-000001.arrow").is_file()
    alone, _ = made(root, "alone", codes="int8", vectors="none")
    whole = np.stack([np.frombuffer(one, np.int8) for one in pq.read_table(alone.parts[0].path)["code"].to_pylist()])
    scale = json.loads(pq.read_schema(alone.parts[0].path).metadata[b"scale"])
    np.testing.assert_allclose(whole * np.array(scale), library.parts[0].vec, atol=max(scale) * 0.51 + 1e-3)
    assert not list((root / "alone").glob("*.arrow"))


@pytest.mark.parametrize(("codes", "vectors"), KINDS)
def test_a_library_of_codes_follows_its_folder(
    tmp_path: Path, codes: CodeKind, vectors: StoredKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "model")
    photos_in(tmp_path / "photos")
    monkeypatch.setattr(index, "COMMIT_S", -1.0)  # a part for each batch, which are merged
    made(tmp_path, "library", codes=codes, vectors=vectors, batch=5)
    (tmp_path / "photos/00.jpg").unlink()
    draw(tmp_path / "photos/new.jpg", 77)
    index.main(tmp_path / "photos", None, tmp_path / "library", device="cpu")
    library = Library(tmp_path / "library")
    assert (len(library), len(library.parts), library.file.codes) == (12, 1, codes)
    matcher = load(tmp_path / "model")
    fresh = matcher.encode_image([library.photo(row) for row in range(12)])["vec"]
    stored = library.features(range(12))["vec"]
    torch.testing.assert_close(stored, fresh, atol=0.02, rtol=0)
    assert Ranker(library, matcher).by_image(fresh[7], 1)[0].row == 7


def test_a_library_remembers_its_dimension(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library, matcher = made(root, "eight", dim=8)
    assert capsys.readouterr().err.count("note:") == 0  # 8 is a prefix of the training
    assert (library.file.dim, matcher.model.config.head.dim) == (8, 8)
    whole = load(root / "model").score([library.photo(row) for row in range(30)], [TEXT])[:, 0]
    own = matcher.score([library.photo(row) for row in range(30)], [TEXT])[:, 0]
    assert not torch.allclose(whole, own, atol=1e-3)
    ((_, score),) = rows(library, matcher, None, 1)
    assert score == pytest.approx(float(own.max()), abs=2e-3)
    index.main(root / "photos", None, root / "eight", device="cpu")  # the same again, by itself
    assert Site(library, opened_for(library, None, "cpu", "fp32"), "model").get("/", "q=a+dog").status == 200
    made(root, "seven", dim=7)
    assert "trained on its first 8 numbers, and not on its first 7" in capsys.readouterr().err


def test_a_search_compares_the_first_numbers(root: Path, exact: tuple[Library, Matcher]) -> None:
    library, _ = exact
    eight, matcher = made(root, "first-eight", dim=8)
    found = rows(library, opened_for(library, None, "cpu", "fp32", dim=8), None)
    expected = rows(eight, matcher, None)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_the_recall_of_codes_is_measured(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "TOP", 3)
    monkeypatch.setitem(rank.RESCORE, "binary", 4)
    library, matcher = made(root, "recall", codes="binary")
    measured = library.file.recall
    assert (measured["shortlist"], measured["photos"]) == (12, 30)
    assert 0.4 < measured["recall@10"] < 1
    assert "12 photos nearest by their binary codes exactly" in index.describe(library)[0]
    assert rank.measure(Ranker(library, matcher, 0)) == {}


@pytest.mark.parametrize(("codes", "vectors"), KINDS)
def test_codes_of_the_first_numbers_list_what_whole_vectors_rank(
    root: Path, exact: tuple[Library, Matcher], codes: CodeKind, vectors: StoredKind
) -> None:
    library, matcher = made(root, f"first-{codes}-{vectors}", codes=codes, vectors=vectors, dim=8)
    whole = load(root / "model")
    images = whole.encode_image([library.photo(row) for row in range(30)])["vec"]
    text = whole.encode_text(TEXT)["vec"]
    cosines = first(images, 8) @ first(text, 8) if codes == "int8" else first(images, 8).sign() @ text[:8].sign() / 8
    near = Ranker(library, matcher).near(matcher.encode_text(TEXT)["vec"])
    torch.testing.assert_close(near, cosines, atol=0.02, rtol=0)
    assert library.file.dim == (8 if vectors == "none" else 16)
    if vectors == "fp16":
        expected = [score for _, score in rows(*exact, None)]
        assert [score for _, score in rows(library, matcher, 6)] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("codes", ["int8", "binary"])
def test_an_approximate_index_of_codes(root: Path, codes: CodeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch.index", reason="needs usearch, the extra search")
    library, matcher = made(root, f"large-{codes}", codes=codes, dim=8)
    expected = rows(library, matcher, 30)
    monkeypatch.setattr(nearest, "LARGE", 3)
    nearest.update_nearest(library)
    assert Ranker(library, matcher).nearest is not None
    found = rows(library, matcher, None)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_bad_input(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, model, out = root / "photos", root / "model", root / "refused"
    new = ("index", photos, "--model", model, "--out", out)
    assert "dimension 0 was asked for: expected 1 to 16" in refused(capsys, *new, "--dim", 0)
    assert "dimension 17 was asked for: expected 1 to 16" in refused(capsys, *new, "--dim", 17)
    assert "add --codes int8 or --codes binary" in refused(capsys, *new, "--vectors", "int8")
    assert "choose --vectors fp16, or none" in refused(capsys, *new, "--codes", "int8", "--vectors", "int8")
    for method in ("llip", "prolip"):
        other = model_folder(root / method, method)
        words = ("index", photos, "--model", other, "--out", out)
        assert "--codes int8 are for models that score a pair by the cosine" in refused(
            capsys, *words, "--codes", "int8"
        )
        assert "more than the cosine of one vector each" in refused(capsys, *words, "--dim", 8)
    made(root, "bits", codes="binary", dim=8)
    bits = root / "bits"
    assert "made with --codes binary, and not with int8" in refused(
        capsys, "index", photos, "--out", bits, "--codes", "int8"
    )
    assert "made with --dim 8, and not with 4" in refused(capsys, "index", photos, "--out", bits, "--dim", 4)
    assert "binary codes of 8 numbers, in which --dim 4 cannot search" in refused(
        capsys, "search", bits, "a dog", "--dim", 4
    )
    assert "in which --dim 16 cannot search" in refused(capsys, "search", bits, "a dog", "--dim", 16)
    assert "--rescore is -1: expected 0 or more" in refused(capsys, "search", bits, "a dog", "--rescore", -1)
    made(root, "bare", codes="binary", vectors="none")
    assert "stores codes alone" in refused(capsys, "search", root / "bare", "a dog", "--rescore", 4)
    made(root, "plain")
    assert "expected 1 to 16, the embedding size of" in refused(capsys, "search", root / "plain", "a dog", "--dim", 32)
    assert "is for libraries of codes" in refused(capsys, "search", root / "plain", "a dog", "--rescore", 4)


def test_damaged_codes_are_refused(root: Path) -> None:
    matcher = made(root, "damaged", codes="int8", vectors="none")[1]
    path = root / "damaged/part-000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"scale": "[1, 2]"}), path)
    with pytest.raises(ValueError, match="its numbers have no scale"):
        rows(Library(root / "damaged"), matcher, None)
    made(root, "damaged")
    assert len(rows(Library(root / "damaged"), matcher, None)) == 5
    pq.write_table(table.drop_columns("code"), path := next((root / "damaged").glob("*.parquet")))
    with pytest.raises(ValueError, match="missing or damaged"):
        rows(Library(root / "damaged"), matcher, None)
