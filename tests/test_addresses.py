"""Addresses of data: what of a URL is its identity, and where its credentials go."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings, strategies as st

from kiloword.addresses import address_of, public, scrubbed, split, without_credentials
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import parse
from kiloword.data.open import open_source
from kiloword.terminal import show_traceback
from research import arms, arms_queue, arms_table, flickr
from servers import LOGIN, PLANTED, Guarded
from tars import pairs, write_tar


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILOWORD_REMOTE", "backoff=0.001 timeout=5 retries=1 ahead=0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "plantedsecretkey")
    monkeypatch.setenv("HTTP_PROXY", "http://planteduser:plantedproxy@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded({"0.tar": write_tar(tmp_path / "0.tar", pairs(8)).read_bytes()}, signed=("0.tar",)) as server:
        yield server


@pytest.mark.parametrize(
    ("url", "identity"),
    [
        ("https://user:p%2Fw@host:8/a/{00..05}.tar?sig=1#part", "https://host:8/a/{00..05}.tar"),
        ("abfs://container@account/x.tar?sig=1", "abfs://container@account/x.tar"),
        ("abfs://user:key@account/x.tar", "abfs://account/x.tar"),
        ("https://a@b@[::1]:80/x", "https://[::1]:80/x"),
        ("hf://datasets/a/b@main/0.tar", "hf://datasets/a/b@main/0.tar"),
        ("s3://arn:aws:s3:eu:1:point/0.tar", "s3://arn:aws:s3:eu:1:point/0.tar"),
        ("file:///0.tar", "file:///0.tar"),
    ],
)
def test_what_of_an_address_is_shown(url: str, identity: str) -> None:
    address = split(url)
    assert str(address) == address.url == identity
    assert repr(address) == f"Address(url='{identity}')"
    assert pickle.loads(pickle.dumps(address)).full == address.full == url
    assert address == split(identity)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:planted/pw@h/0.tar",
        "https://u:planted?@h/0.tar",
        "ftp://u:planted#@h/0.tar",
        "https:///0.tar",
        "http://user:planted@/0.tar",
        "s3://key:planted/pw@bucket/0.tar",  # secret keys of AWS have a / in them
        "zip://0.tar::https://u:planted@h/0.zip",
        "https://h/0.tar,https://u:planted@h/1.tar",
    ],
)
def test_an_address_whose_login_is_not_quoted_is_refused_and_not_repeated(url: str) -> None:
    for reads in (split, open_source, public):
        with pytest.raises(ValueError, match="login") as caught:
            reads(url)
        assert PLANTED not in str(caught.value)
    assert PLANTED not in scrubbed(f"cannot open {url} now")


def test_words_of_the_command_line() -> None:
    url = "https://u:plantedpw@words.org/0.tar?token=plantedtoken"
    assert public(f"--data={url}") == "--data=https://words.org/0.tar"
    assert public(f"open_clip:ViT-B-32:{url}") == "open_clip:ViT-B-32:https://words.org/0.tar"
    assert address_of("https://words.org/0.tar").full == url
    for word in ("a dog", "see http://a.org?b=1", "scenes?n=3", "--steps=3", "/a/b?c", "C://x"):
        assert public(word) == word
    assert scrubbed(f"no {url!r}, plantedpw, plantedtoken") == "no 'https://words.org/0.tar', ***, ***"
    assert "planted" not in scrubbed("plantedsecretkey of http://planteduser:plantedproxy@127.0.0.1:9")
    public("https://files.org/get.tar?id=1&sig=1")
    assert public("https://files.org/get.tar?sig=2&id=1") == "https://files.org/get.tar"  # the newest signature
    assert address_of("https://files.org/get.tar").query == "?sig=2&id=1"
    with pytest.raises(ValueError, match=r"https://files.org/get.tar comes with two different queries"):
        public("https://files.org/get.tar?id=2&sig=1")


def test_a_recipe_holds_no_credentials() -> None:
    data = DataConfig(sources=("https://u:planted@recipe.org/0.tar?sig=planted",))
    assert data.sources == ("https://recipe.org/0.tar",)
    assert parse({"sources": ["https://x:old@recipe.org/0.tar?sig=old"]}, DataConfig).sources == data.sources
    assert address_of(data.sources[0]).login == "u:planted"  # a file changes no credentials


def test_a_refreshed_signature_finds_the_same_data(server: Guarded) -> None:
    first = open_source(server.secret("0.tar"))
    assert first.name == f"{server.url}/0.tar"
    server.signature = "refreshed"
    with pytest.raises(ValueError, match="403"):
        open_source(server.secret("0.tar"))
    again = open_source(server.secret("0.tar", "?X-Amz-Signature=refreshed&X-Amz-Date=2"))
    assert again.fingerprint == first.fingerprint
    assert pickle.loads(pickle.dumps(again)).record(0).key == "0000"


def test_a_login_goes_to_its_own_server_alone(server: Guarded) -> None:
    server.signed = ()
    with Guarded({"0.tar": server.files["0.tar"]}, login=False) as other:
        server.targets = {"away.tar": f"{other.url}/0.tar", "near.tar": "/0.tar"}
        for name in ("near.tar", "away.tar"):
            assert open_source(server.secret(name, "")).record(0).key == "0000"
        assert {authorization for _, authorization in other.seen} == {None}
        other.targets["back.tar"] = f"{server.url.replace('//', f'//{LOGIN}@')}/0.tar"
        with pytest.raises(ValueError, match="401"):  # a redirect gives no login
            open_source(f"{other.url}/back.tar")


def test_an_experiment_keeps_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its options are stored; the runs that it starts get all of the URL."""
    url, seen = "https://u:planted@experiment.org/0.tar?sig=planted", list[Any]()
    monkeypatch.setattr(arms_queue, "run_all", lambda _experiment, options: seen.append(options))
    monkeypatch.setattr(arms_table, "table", lambda *_: "")
    arms.main(flickr.EXPERIMENT, ["--out", str(tmp_path), "--data", url, "--val", url])
    assert PLANTED not in repr(seen)
    assert arms.command(flickr.EXPERIMENT, seen[0]).count(url) == 2


def test_a_traceback_has_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    url = "https://u:plantedpassword@host.org/0.tar?sig=plantedsignature"
    show_traceback(RuntimeError, RuntimeError(f"a bug of ours at {url}"), None)
    assert "a bug of ours at https://host.org/0.tar" in (output := capfd.readouterr().err)
    assert PLANTED not in output


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["http", "https", "s3", "ftp", "abfs", "hf"]),
    st.text("ab/?#@:%{}[] \n\u00e4", max_size=6),
    st.text("ab/&=@:. \n", max_size=8).filter(lambda path: not ("@" in path and "://" in path)),  # a login: refused
)
def test_no_url_gives_its_secret_away(scheme: str, odd: str, path: str) -> None:
    """Whatever characters the secrets have, once they are quoted, and the path."""
    secret = quote(f"planted{odd}", safe="")
    for url in (f"{scheme}://:{secret}@host.org/{path}.tar", f"{scheme}://host.org/{path}.tar?key={secret}"):
        address = address_of(url)
        assert secret in address.login + address.query
        assert PLANTED not in address.url + repr(address) + str(without_credentials(url))
        assert PLANTED not in scrubbed(f"{address.full} and {unquote(secret)}")
        assert split(address.full).full == address.full
