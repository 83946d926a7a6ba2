"""The class that embeds a data set in the actors of Ray Data."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import kiloword
from folders import CAPTIONS, model_folder
from kiloword.api.ray import Embedder


def png(seed: int) -> bytes:
    """An image file of 40 x 30 pixels of noise."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)).save(out, "png")
    return out.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "m")


def rows(table: pa.Table, name: str) -> Any:
    return np.array(table[name].to_pylist(), np.float32)


def test_a_batch_gets_features_of_both_kinds(model: Path) -> None:
    files, texts = [png(1), png(2), png(3)], CAPTIONS[:3]
    table = Embedder(model, text="text")({"image": np.array(files, object), "text": texts, "id": np.arange(3)})
    matcher = kiloword.load(model)
    assert table.column_names == ["text", "id", "image_vec", "text_vec", "error"]
    assert table.schema.field("image_vec").type == pa.list_(pa.float32(), rows(table, "image_vec").shape[1])
    assert np.array_equal(rows(table, "image_vec"), matcher.encode_image(files)["vec"].numpy())
    assert np.array_equal(rows(table, "text_vec"), matcher.encode_text(texts)["vec"].numpy())
    assert table["error"].null_count == 3


def test_bad_rows_get_nulls_and_a_reason(model: Path) -> None:
    embedder = Embedder(model, text="text")
    table = embedder(pa.table({"image": [b"no image", png(1), None], "text": ["a", None, None]}))
    assert table["image_vec"].is_valid().to_pylist() == [False, True, False]
    assert table["text_vec"].is_valid().to_pylist() == [True, False, False]
    first, second, third = table["error"].to_pylist()
    assert first.startswith("the image cannot be used")
    assert second == "the text is NoneType: expected a string"
    assert "NoneType as the image" in third
    assert third.endswith("; the text is NoneType: expected a string")
    unusable = pa.table({"image": [b"x"], "text": ["a"]})
    for nothing in (unusable, unusable.slice(0, 0)):
        assert embedder(nothing).schema == table.schema
    with pytest.raises(ValueError, match="no column 'text'"):
        embedder({"image": [png(1)]})


def test_paths_are_kept_and_addresses_not_fetched(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    table = Embedder(model, image="path")({"path": [str(tmp_path / "a.png"), "https://example.org/a.png"]})
    assert table["path"].to_pylist()[0] == str(tmp_path / "a.png")
    assert table["image_vec"].is_valid().to_pylist() == [True, False]
    assert "not fetched" in table["error"].to_pylist()[1]


def test_images_of_the_library_datasets_are_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    structs = [{"bytes": png(1), "path": "gone.png"}, {"bytes": None, "path": str(tmp_path / "a.png")}]
    table = Embedder(model)(pa.table({"image": structs}))
    assert table["error"].to_pylist() == [None, None]
    assert rows(table, "image_vec")[0].tolist() == rows(table, "image_vec")[1].tolist()


def test_gaussians_get_their_variance(tmp_path: Path) -> None:
    table = Embedder(model_folder(tmp_path / "m", "prolip"))({"image": [png(1), b""]})
    matcher = kiloword.load(tmp_path / "m")
    features = matcher.encode_image([png(1)])
    assert np.allclose(table["image_log_var"].to_pylist()[0], features["log_var"][0].numpy())
    assert table["image_uncertainty"].to_pylist() == [pytest.approx(float(matcher.uncertainty(features)[0])), None]


def test_blocks_without_a_path_keep_the_column(model: Path) -> None:
    """Whatever type Arrow gives a block: all blocks of a data set have the same columns."""
    embed = Embedder(model)
    for column in (pa.array([None, None]), pa.array(["a", None]), pa.array(["a", "b"]).dictionary_encode()):
        assert "image" in embed(pa.table({"image": column})).column_names
    assert "image" in embed({"image": ["nowhere.png", None]}).column_names
    assert "image" not in embed({"image": [png(1), None]}).column_names


def test_what_cannot_be_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="decoder"):
        Embedder(model, caption=True)
    with pytest.raises(ValueError, match="no column to read"):
        Embedder(model, image=None)
    with pytest.raises(ValueError, match="has a column 'error', which the Embedder writes"):
        Embedder(model)(pa.table({"image": [png(1)], "error": ["of another"]}))
    for odd in (["\ud800"], [1, "a"]):
        with pytest.raises(ValueError, match="the column 'other' cannot be kept in a table"):
            Embedder(model)({"image": [png(1)] * len(odd), "other": odd})


@pytest.mark.slow
def test_ray_is_not_imported_and_the_class_pickles_small() -> None:
    assert len(pickle.dumps(Embedder)) < 200
    code = "import sys, kiloword.api.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_actors_of_ray_give_what_one_process_gives(model: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'kiloword[ray]'")
    read_parquet = pytest.importorskip("ray.data", reason="needs ray[data]").read_parquet
    files = [png(seed) for seed in range(24)]
    files[5] = b"no image"
    pq.write_table(pa.table({"id": range(24), "image": files}), tmp_path / "in.parquet")
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}
    )
    try:
        data = read_parquet(str(tmp_path / "in.parquet")).map_batches(
            Embedder, fn_constructor_args=[str(model)], batch_format="pyarrow", batch_size=8, concurrency=2
        )
        data.write_parquet(str(tmp_path / "out"))
    finally:
        ray.shutdown()
    table = pq.read_table(tmp_path / "out").sort_by("id")
    alone = Embedder(model)(pa.table({"id": range(24), "image": files}))
    assert table["error"].to_pylist() == alone["error"].to_pylist()
    assert table["image_vec"].null_count == 1
    for one, other in zip(table["image_vec"].to_pylist(), alone["image_vec"].to_pylist(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.allclose(one, other, atol=1e-6)
