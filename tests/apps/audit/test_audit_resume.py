"""A killed audit goes on where it was, and finds what an audit that nobody killed finds."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from folders import model_folder
from kiloword.api import Matcher
from kiloword.apps.audit import AuditOptions, command, resume
from kiloword.evaluation.command import Execution
from photo_folders import draw

EXECUTION = Execution(batch=4, device="cpu", workers=0)
BAD = (0, 9, 10, 11)  # of 16 rows, one of them a batch of its own with 8


def captioned(folder: Path, n: int = 16) -> Path:
    for i in range(n):
        draw(folder / f"{i:02}.jpg", i)
        words = f"image {i}\nanother one of {i}\n" if i else ""
        (folder / f"{i:02}.txt").write_text(words, encoding="utf-8")
    for i in BAD:
        (folder / f"{i:02}.jpg").write_bytes(b"no image")
    return folder


def audit(photos: Path, model: Path, out: Path) -> dict[str, Any]:
    command.main([str(photos)], str(model), out, AuditOptions(), EXECUTION)
    assert not (out / resume.FOLDER).exists()
    found = {name: pyarrow.parquet.read_table(out / name).to_pylist() for name in ("keep.parquet", "findings.parquet")}
    return {**found, "audit": json.loads((out / "audit.json").read_text(encoding="utf-8"))["findings"]}


def killed_after(monkeypatch: pytest.MonkeyPatch, batches: int, error: BaseException) -> list[int]:
    """Encoding ends with an error after some batches. Returns: the sizes of all batches, which grows."""
    encode, sizes = Matcher.encode_image, list[int]()

    def killed(matcher: Matcher, images: torch.Tensor, **options: Any) -> Any:
        sizes.append(len(images))
        if len(sizes) == batches + 1:
            raise error
        return encode(matcher, images, **options)

    monkeypatch.setattr(Matcher, "encode_image", killed)
    return sizes


@pytest.mark.parametrize("method", ["siglip", "llip", "prolip"])
def test_a_killed_audit_goes_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, photos, out = model_folder(tmp_path / "model", method), captioned(tmp_path / "photos"), tmp_path / "out"
    whole = audit(photos, model, tmp_path / "whole")
    monkeypatch.setattr(resume, "EVERY_S", -1.0)
    sizes = killed_after(monkeypatch, 2, MemoryError())
    with pytest.raises(MemoryError):
        command.main([str(photos)], str(model), out, AuditOptions(), EXECUTION)
    assert capsys.readouterr()
    assert audit(photos, model, out) == whole
    assert "8 of 16 rows are encoded already" in capsys.readouterr().out
    assert sum(sizes[3:]) == 16 - 8 - len(BAD) + 1


def test_ctrl_c_keeps_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, photos, out = model_folder(tmp_path / "model"), captioned(tmp_path / "photos"), tmp_path / "out"
    killed_after(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="8 of 16 rows are encoded; the same command goes on"):
        command.main([str(photos)], str(model), out, AuditOptions(), EXECUTION)
    assert len(audit(photos, model, out)["keep.parquet"]) == 31


def test_an_interrupted_batch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bad rows were counted already when its captions were encoded."""
    model, photos, out = model_folder(tmp_path / "model"), captioned(tmp_path / "photos"), tmp_path / "out"
    encode = Matcher.encode_text

    def interrupted(matcher: Matcher, texts: list[str], **options: Any) -> Any:
        if "image 8" in texts:
            monkeypatch.setattr(Matcher, "encode_text", encode)
            raise KeyboardInterrupt
        return encode(matcher, texts, **options)

    monkeypatch.setattr(Matcher, "encode_text", interrupted)
    with pytest.raises(KeyboardInterrupt, match="8 of 16 rows"):
        command.main([str(photos)], str(model), out, AuditOptions(), EXECUTION)
    assert audit(photos, model, out) == audit(photos, model, tmp_path / "whole")


def test_rows_of_another_model_or_damaged_ones_are_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, photos, out = model_folder(tmp_path / "model"), captioned(tmp_path / "photos"), tmp_path / "out"
    monkeypatch.setattr(resume, "EVERY_S", -1.0)
    killed_after(monkeypatch, 2, MemoryError())
    with pytest.raises(MemoryError):
        command.main([str(photos)], str(model), out, AuditOptions(), EXECUTION)
    first, second = sorted((out / resume.FOLDER).glob("part-*"))
    first.write_bytes(second.read_bytes())
    (out / resume.FOLDER / "notes.txt").touch()  # of the user
    saved = resume.SavedRows(out / resume.FOLDER, json.loads((out / resume.FOLDER / resume.IDENTITY).read_text()))
    assert saved.done == 0
    with pytest.raises(AssertionError):  # notes.txt stays
        audit(photos, model_folder(tmp_path / "other", "clip"), out)
    assert [path.name for path in (out / resume.FOLDER).iterdir()] == ["notes.txt"]
    said = capsys.readouterr().out
    assert "encoded already" not in said
    assert "holds rows of another model, precision or other data: they are removed" in said


def test_the_command_that_follows_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my photos").mkdir()
    photos = captioned(tmp_path / "my photos")  # with bad ones, which are not kept
    command.main(
        [str(photos)], str(model_folder(tmp_path / "model")), tmp_path / "two words", AuditOptions(), EXECUTION
    )
    training = f"kiloword train METHOD --data '{photos}' --keep '{tmp_path}/two words/keep.parquet' --out DIR"
    assert training in capsys.readouterr().out
    assert training in html.unescape((tmp_path / "two words" / "report.html").read_text())
