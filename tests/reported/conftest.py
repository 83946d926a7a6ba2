"""Shared by the tests of what users reported: how a command ends, and one small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from users import Refused, Run

from folders import model_folder
from kiloword.cli.main import main


@pytest.fixture
def raw(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code of a command, and what it printed."""

    def typed(*words: object) -> tuple[int, str]:
        code: object = 0
        capsys.readouterr()
        try:
            main(list(map(str, words)))
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code if isinstance(code, int) else 1, printed.out + printed.err

    return typed


@pytest.fixture
def run(raw: Run) -> Run:
    """Exit code of a command, and what it printed as one line."""

    def joined(*words: object) -> tuple[int, str]:
        code, printed = raw(*words)
        return code, " ".join(printed.split())

    return joined


@pytest.fixture
def refused(run: Run) -> Refused:
    """What a command says that ends with exit code 2."""

    def said(*words: object) -> str:
        code, printed = run(*words)
        assert code == 2, printed
        return printed

    return said


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("reported") / "model")
