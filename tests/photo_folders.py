"""Folders of small photos without captions, and commands that must be refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kiloword.cli.main import main


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((40, 30), Image.Resampling.NEAREST).save(path, quality=95)


def photos_in(folder: Path, n: int = 12) -> Path:
    for i in range(n):
        draw(folder / ("deep" if i % 2 else "") / f"{i:02}.jpg", i)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 2
    return capsys.readouterr().err


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code of a command, and what it printed; wrapped lines are joined."""
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    printed = capsys.readouterr()
    return code, " ".join(f"{printed.out}\n{printed.err}".split())
