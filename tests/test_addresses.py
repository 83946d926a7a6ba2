"""Addresses of data: what of a URL is its identity, and where its credentials go."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiloword import addresses
from kiloword.addresses import address_of, public, scrubbed, split, without_credentials
from kiloword.config.recipes import DataConfig
from kiloword.config.settings import parse
from kiloword.data.remote.config import remote_config
from kiloword.data.remote.errors import Unreachable
from kiloword.data.remote.file import open_remote_file
from kiloword.data.sources.open import open_source
from kiloword.terminal import show_traceback
from research import arms, arms_queue, arms_table, flickr
from servers import LOGIN, PLANTED, Guarded, Server
from tars import pairs, write_tar


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "KILOWORD_REMOTE": "backoff=0.001 timeout=5 retries=1 ahead=0",
        "AWS_SECRET_ACCESS_KEY": "plantedsecretkey",
        "HTTP_PROXY": "http://planteduser:plantedproxy@127.0.0.1:9",
        "no_proxy": "*",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def tar(folder: Path, first: int = 0) -> bytes:
    return write_tar(folder / f"{first}.tar", pairs(8, first)).read_bytes()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded({"0.tar": tar(tmp_path_factory.mktemp("served"))}, signed=("0.tar",)) as server:
        yield server


def test_an_address_and_its_credentials() -> None:
    address = split("https://user:p%2Fw@host:8/a/{00..05}.tar?sig=1#part")
    assert str(address) == address.url == "https://host:8/a/{00..05}.tar"
    assert repr(address) == "Address(url='https://host:8/a/{00..05}.tar')"
    assert address.full == "https://user:p%2Fw@host:8/a/{00..05}.tar?sig=1#part"
    assert address.asked == "https://host:8/a/{00..05}.tar?sig=1"
    assert address.authorization == "Basic " + base64.b64encode(b"user:p/w").decode()
    assert address == split("https://host:8/a/{00..05}.tar")
    assert pickle.loads(pickle.dumps(address)).full == address.full
    assert split("abfs://container@account/x.tar?sig=1").url == "abfs://container@account/x.tar"
    assert split("abfs://user:key@account/x.tar").url == "abfs://account/x.tar"
    assert split("HTTPS://a@b@[::1]:80/x").full == "https://a@b@[::1]:80/x"


@pytest.mark.parametrize(
    "url", ["http://u:planted/pw@h/0.tar", "https://u:planted?@h/0.tar", "ftp://u:planted#@h/0.tar"]
)
def test_a_login_that_is_not_quoted(url: str) -> None:
    for reads in (split, open_source, public):
        with pytest.raises(ValueError, match=r"no valid host and port.* write %2F for a slash") as caught:
            reads(url)
        assert PLANTED not in str(caught.value)
        assert scrubbed(str(caught.value)) == str(caught.value)  # as the command line prints it


@pytest.mark.parametrize(
    "url",
    [
        "https:///0.tar",
        "https://:80/0.tar",
        "http://user:pass@/0.tar",
        "ftp:///0.tar",
        "http://127.0.0.1:65536/0.tar",
        "http://127.0.0.1:0/0.tar",
        "ftp://[::1]:99999/0.tar",
    ],
)
def test_an_address_without_a_host_or_a_port_is_refused_at_once(url: str) -> None:
    for reads in (split, open_source, public):
        with pytest.raises(
            ValueError, match=r"^an address of \w+ has no valid host and port \(1 to 65535\)\. Expected"
        ):
            reads(url)
    assert split("http://h:65535/0.tar").url == "http://h:65535/0.tar"
    assert split("file:///0.tar").url == "file:///0.tar"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:planted/pw@bucket/0.tar",  # secret keys of AWS have a / in them
        "zip://0.tar::https://u:planted@h/0.zip",
        "zip://a/0.tar::https://u:planted@h/0.zip?x=1",
        "https://h/0.tar,https://u:planted@h/1.tar",
    ],
)
def test_a_login_inside_a_path(url: str) -> None:
    for reads in (split, open_source, public):
        with pytest.raises(ValueError, match="may have a login in its path") as caught:
            reads(url)
        assert PLANTED not in str(caught.value)
    assert PLANTED not in scrubbed(f"cannot open {url} now")


def test_an_at_sign_in_a_path_stays() -> None:
    for url in ("hf://datasets/a/b@main/0.tar", "https://h:80/a@b/0.tar", "s3://arn:aws:s3:eu:1:point/0.tar"):
        assert split(url).url == url


def test_what_a_server_sends_is_not_remembered() -> None:
    """Signatures of redirects would fill the memory of a long run; words of a server's choice would be hidden."""
    before = len(addresses._secrets)
    for n in range(100):
        assert scrubbed(f"see https://u:secret{n:04d}@h/0?sig={n:08d}") == "see https://h/0"
        split(f"https://u:secret{n:04d}@h/0?sig={n:08d}")
    assert len(addresses._secrets) == before


def test_words_of_the_command_line() -> None:
    url = "https://u:plantedpw@words.org/0.tar?token=plantedtoken"
    assert public(f"--data={url}") == "--data=https://words.org/0.tar"
    assert public(f"open_clip:ViT-B-32:{url}") == "open_clip:ViT-B-32:https://words.org/0.tar"
    assert address_of("https://words.org/0.tar").full == url
    for word in ("a dog", "see http://a.org?b=1", "scenes?n=3", "--steps=3", "/a/b?c", "C://x"):
        assert public(word) == word
    assert scrubbed(f"no {url!r}, plantedpw, plantedtoken") == "no 'https://words.org/0.tar', ***, ***"
    assert (
        scrubbed("abfs://box@account/0.tar: 403, http://u:planted/pw@h/0")
        == "abfs://box@account/0.tar: 403, http://***"
    )
    assert "planted" not in scrubbed("plantedsecretkey of http://planteduser:plantedproxy@127.0.0.1:9")


def test_two_files_that_only_a_query_tells_apart() -> None:
    public("https://files.org/get.tar?id=1&sig=1")
    assert public("https://files.org/get.tar?sig=2&id=1") == "https://files.org/get.tar"  # the newest signature
    assert address_of("https://files.org/get.tar").query == "?sig=2&id=1"
    with pytest.raises(ValueError, match=r"https://files.org/get.tar comes with two different queries"):
        public("https://files.org/get.tar?id=2&sig=1")


def test_a_recipe_holds_no_credentials() -> None:
    data = DataConfig(
        sources=("https://u:planted@recipe.org/0.tar?sig=planted",), val=("https://recipe.org/1.tar?se=1",)
    )
    assert data.sources == ("https://recipe.org/0.tar",)
    assert data.val == ("https://recipe.org/1.tar",)
    assert address_of(data.sources[0]).login == "u:planted"
    there = parse({"sources": ["https://x:old@recipe.org/0.tar?sig=old"]}, DataConfig)  # of an older version
    assert there.sources == data.sources
    assert address_of(data.sources[0]).login == "u:planted"  # a file changes no credentials


def test_files_of_one_path_are_not_mistaken(tmp_path: Path) -> None:
    """A server that gives no ETag and no date: only the query tells the two apart."""
    one, two = tar(tmp_path), tar(tmp_path, 20)
    assert len(one) == len(two)

    class ById(Server):
        def answer(self, request: Any) -> None:
            self.files["get.tar"] = two if "id=2" in request.path else one
            super().answer(request)

        def _head(self, request: Any, status: int, headers: dict[str, str]) -> None:
            super()._head(request, status, {k: v for k, v in headers.items() if k != "Last-Modified"})

    with ById({"get.tar": one}) as server:
        keys = [open_source(f"{server.url}/get.tar?id={n}").record(0).key for n in (1, 2, 1)]
    assert keys == ["0000", "0020", "0000"]


def test_a_refreshed_signature_finds_the_cache(server: Guarded) -> None:
    first = open_source(server.secret("0.tar"))
    assert first.name == f"{server.url}/0.tar"
    first.record(0)
    asked, server.signature = server.asked["0.tar"], "refreshed"
    with pytest.raises(Unreachable, match="403"):
        open_source(server.secret("0.tar"))
    again = open_source(server.secret("0.tar", "?X-Amz-Signature=refreshed&X-Amz-Date=2"))
    assert again.fingerprint == first.fingerprint
    assert again.record(0).captions == first.record(0).captions
    assert server.asked["0.tar"] == asked
    assert pickle.loads(pickle.dumps(again)).record(0).key == "0000"


def test_a_login_goes_to_its_own_server_alone(server: Guarded) -> None:
    server.signed = ()
    with Guarded({"0.tar": server.files["0.tar"]}, login=False) as other:
        server.targets = {"away.tar": f"{other.url}/0.tar", "near.tar": "/0.tar"}
        assert open_source(server.secret("near.tar", "")).record(0).key == "0000"
        assert open_source(server.secret("away.tar", "")).record(0).key == "0000"
        assert {authorization for _, authorization in other.seen} == {None}
        other.targets["back.tar"] = f"{server.url.replace('//', f'//{LOGIN}@')}/0.tar"
        with pytest.raises(Unreachable, match="401: it asks for a login"):  # a redirect gives no login
            open_remote_file(f"{other.url}/back.tar", remote_config())


def test_a_login_of_a_proxy_goes_to_the_proxy_alone(
    server: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy redirects to a host that it does not serve."""
    heard: list[Any] = []

    class Proxy(Server):
        def answer(self, request: Any) -> None:
            heard.append((request.path, request.headers.get("Proxy-Authorization")))
            self._head(request, 302, {"Location": f"{server.url}/0.tar", "Content-Length": "0"})

    class Direct(Guarded):
        def answer(self, request: Any) -> None:
            heard.append((request.path, request.headers.get("Proxy-Authorization")))
            super().answer(request)

    with Proxy({}) as proxy, Direct(server.files, login=False) as direct:
        server.url = direct.url
        monkeypatch.setenv("http_proxy", f"http://planteduser:plantedproxy@{proxy.url[7:]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("KILOWORD_REMOTE", "retries=0 timeout=6")
        open_remote_file("http://nowhere.example/0.tar", remote_config())
    basic = base64.b64encode(b"planteduser:plantedproxy").decode()
    assert heard == [("http://nowhere.example/0.tar", f"Basic {basic}"), ("/0.tar", None)]


@pytest.mark.parametrize(
    "proxy", ["http://planteduser:plan/ted@127.0.0.1:9", "//planted:planted@", "http://planted:planted@127.0.0.1:x"]
)
def test_a_proxy_that_is_none(proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("KILOWORD_REMOTE", "retries=0 timeout=7")
    with pytest.raises(ValueError, match=r"http://some.example/0.tar") as caught:
        open_source("http://some.example/0.tar")
    assert PLANTED not in str(caught.value)
    assert "plan/ted" not in str(caught.value)


def test_an_environment_in_no_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a library says about a file system whose keys come from the environment."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Talks(MemoryFileSystem):  # type: ignore[misc]
        protocol = "talks"

        def info(self, path: str, **more: Any) -> dict[str, Any]:
            raise PermissionError(f"key plantedsecretkey and {path} are not for https://u:planted@h/?X-Amz=planted")

    fsspec.register_implementation("talks", Talks, clobber=True)
    with pytest.raises(ValueError, match=r"talks://bucket/0.tar: access denied \(key \*\*\*") as caught:
        open_source("talks://bucket/0.tar?key=planted")
    assert PLANTED not in str(caught.value)
    monkeypatch.setenv("KILOWORD_REMOTE", "http://planteduser:planted@h/")
    with pytest.raises(ValueError, match="is no setting") as caught:
        remote_config()
    assert PLANTED not in str(caught.value)


def test_an_experiment_keeps_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its options are stored; the runs that it starts get all of the URL."""
    url, seen = "https://u:planted@experiment.org/0.tar?sig=planted", list[Any]()
    monkeypatch.setattr(arms_queue, "run_all", lambda _experiment, options: seen.append(options))
    monkeypatch.setattr(arms_table, "table", lambda *_: "")
    arms.main(flickr.EXPERIMENT, ["--out", str(tmp_path), "--data", url, "--val", url])
    assert PLANTED not in repr(seen)
    assert arms.command(flickr.EXPERIMENT, seen[0]).count(url) == 2


def test_a_traceback_has_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    address = split("https://u:plantedpassword@host.org/0.tar?sig=plantedsignature")
    error = RuntimeError(f"a bug of ours at {address.full}")
    show_traceback(RuntimeError, error, None)
    assert "a bug of ours at https://host.org/0.tar" in (output := capfd.readouterr().err)
    assert PLANTED not in output


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["http", "https", "s3", "ftp", "abfs", "hf"]),
    st.text("ab/?#@:%{}[] \n\u00e4", max_size=6),
    st.text("ab/?#&=@:. \n", max_size=8).filter(lambda path: not ("@" in path and "://" in path)),  # a login: refused
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
