"""eval uncertainty of texts without images."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_uncertainty import matcher

from kiloword.cli.main import main
from kiloword.config.recipes import ModelFile
from kiloword.data.tables import open_texts
from kiloword.evaluation import evaluate
from kiloword.models.model_folder import save_model
from kiloword.types import BadSample

TEXTS = ["film series", "a red dog, on a big blue background", "a cat", "film series"]


def written(folder: Path) -> list[str]:
    """The same texts in all formats."""
    quoted = "\n".join(f'{n},"{text}"' for n, text in enumerate(TEXTS))
    (folder / "a.csv").write_text("id,caption\n" + quoted)
    (folder / "b.tsv").write_text("url\twords\n" + "\n".join(f"u\t{text}" for text in TEXTS))
    (folder / "c.txt").write_text("\n".join(TEXTS) + "\n\n")
    pq.write_table(pa.table({"captions": [TEXTS[:3], TEXTS[3:]]}), folder / "d.parquet")
    pq.write_table(pa.table({"title": TEXTS}), folder / "e.parquet")
    names = ("a.csv", "b.tsv?caption=words", "c.txt", "d.parquet", "e.parquet")
    return [str(folder / name) for name in names]


def test_formats_give_the_same_figures(tmp_path: Path) -> None:
    model, expected = matcher(), None
    sums = model.uncertainty(model.encode_text(TEXTS))
    for src in written(tmp_path):
        found = evaluate(model, "uncertainty", src)
        expected = expected or found
        assert found == expected
        assert found["text_uncertainty_mean"] == pytest.approx(float(sums.mean()))
        assert not any("image" in name or "calibration" in name for name in found)
    assert expected is not None
    assert expected["text_uncertainty_words_6-10"] == pytest.approx(float(sums[1]))


def test_the_page_has_texts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, (src, *_) = matcher(), written(tmp_path)
    save_model(
        tmp_path / "m", model.model, model.tokenizer, ModelFile(method="prolip", settings={}, model=model.model.config)
    )
    files = ["--html", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")]
    main(["eval", "uncertainty", str(tmp_path / "m"), "--data", src, *files])
    html = (tmp_path / "p.html").read_text()
    assert "film series" in html
    assert "Uncertainty by length of the text" in html
    for absent in ("Most certain images", "in a plane", "within their captions", "<img"):
        assert absent not in html
    assert json.loads((tmp_path / "p.json").read_text())["skipped"] == 0
    with pytest.raises(SystemExit) as end:  # other tasks need images, and say which columns there are
        main(["eval", "retrieval", str(tmp_path / "m"), "--data", src])
    assert end.value.code == 2
    assert "has the columns id, caption. Expected `image`" in capsys.readouterr().err


def test_bad_rows_are_named_and_bad_tables_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"caption\na dog\n\xff\xfe\n  \na cat\n")
    source = open_texts(str(tmp_path / "a.csv"))
    assert source is not None
    with pytest.raises(BadSample, match="caption is not UTF-8"):
        source.captions(1)
    skipped: list = []  # type: ignore[type-arg]
    found = evaluate(matcher(), "uncertainty", str(tmp_path / "a.csv"), skipped=skipped)
    assert [one.reason for one in skipped] == ["caption is not UTF-8", "no text"]
    assert found["skipped"] == 2
    (tmp_path / "b.csv").write_text("caption\n")
    (tmp_path / "c.txt").write_text("\n\n")
    (tmp_path / "d.csv").write_text("words\na dog\n")
    pq.write_table(pa.table({"caption": [" ", ""]}), tmp_path / "e.parquet")
    for name, output in (
        ("b.csv", "has no rows. Expected a text in each"),
        ("c.txt", "has no rows. Expected a text in each"),
        ("d.csv", "has the columns words. Expected `image`"),
        ("d.csv?caption=word", "has no column 'word'.*Did you mean words"),
        ("c.txt?caption=x", "takes no options"),
        ("e.parquet", "has a text"),
    ):
        with pytest.raises(ValueError, match=output):
            evaluate(matcher(), "uncertainty", str(tmp_path / name))
