"""URLs: what they mean, and that their credentials stay out of sight."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import (
    ServerAddress,
    advertised_address,
    local_url,
    parse_etcd_url,
    parse_nats_url,
    redact,
)
from dynamo_lite.runtime.tls import TlsFiles

Parse = Callable[[str], ServerAddress]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://me:secret@h:4222", "nats://h:4222"),
        ("nats://token@h:4222,nats://me:secret@i:4222", "nats://h:4222,nats://i:4222"),
        ("me:secret@h:4222", "h:4222"),
        ("nats://me:se@cret@h:4222", "nats://h:4222"),
        ("nats://me:p/ss@h:4222", "nats://h:4222"),
        ("nats://me:a,b@h:4222", "nats://h:4222"),
        ("cannot reach nats://me:secret@h:1 now", "cannot reach nats://h:1 now"),
        ("https://h:1?ca=/a/ca.pem&cert=/b&key=/c", "https://h:1"),
        ("tls://me:a?b=c@h:1,i:2?ca=/a", "tls://h:1,i:2"),
        ("etcd at https://me:secret@h:1?ca=/a failed?", "etcd at https://h:1 failed?"),
    ],
)
def test_credentials_are_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", ServerAddress((("h", 1),))),
        ("http://h", ServerAddress((("h", 2379),))),
        ("http://h/", ServerAddress((("h", 2379),))),
        ("h:1", ServerAddress((("h", 1),))),
        ("http://[::1]:1", ServerAddress((("::1", 1),))),
        ("http://1.1.1.1:1,http://b", ServerAddress((("1.1.1.1", 1), ("b", 2379)))),
        ("http://a,b:2, c:3", ServerAddress((("a", 2379), ("b", 2), ("c", 3)))),
        ("http://me:p%40ss@h:1", ServerAddress((("h", 1),), None, "me", "p@ss")),
        ("http://me:x@a,http://me:x@b:2", ServerAddress((("a", 2379), ("b", 2)), None, "me", "x")),
        ("https://a,b", ServerAddress((("a", 2379), ("b", 2379)), TlsFiles())),
        ("nats://h", ServerAddress((("h", 4222),))),
        ("nats://s%2Fcret@h:1", ServerAddress((("h", 1),), token="s/cret")),
        ("tls://me:x@a,b:2", ServerAddress((("a", 4222), ("b", 2)), TlsFiles(), "me", "x")),
    ],
)
def test_urls(url: str, address: ServerAddress) -> None:
    parse = parse_nats_url if url.startswith(("nats", "tls")) else parse_etcd_url
    assert parse(url) == address
    assert not any(secret in repr(parse(url)) for secret in ("p@ss", "s/cret"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with an authority's and a client's files, the name of one being awkward."""
    authority = trustme.CA()
    own = authority.issue_cert("client")
    authority.cert_pem.write_to_path(tmp_path / "c,a+ &.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    trustme.CA().private_key_pem.write_to_path(tmp_path / "other-key.pem")
    return tmp_path


@pytest.mark.parametrize(("parse", "scheme"), [(parse_etcd_url, "https"), (parse_nats_url, "tls")])
def test_certificates_are_named_in_the_query(files: Path, parse: Parse, scheme: str) -> None:
    query = f"ca={files}/c,a%2B %26.pem&cert={files}/cert.pem&key={files}/key.pem"
    address = parse(f"{scheme}://me:x@a:1,b:2?{query}")
    assert address.hosts == (("a", 1), ("b", 2))
    expected = TlsFiles(files / "c,a+ &.pem", files / "cert.pem", files / "key.pem")
    assert address.tls == expected
    assert all(expected.read())


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("ca=FILES/missing.pem", "missing.pem cannot be read (No such file"),
        ("ca=FILES/a%00b.pem", "a%00b.pem cannot be read (embedded null byte)"),
        ("ca=~nobody-has-this-name/a.pem", "a.pem cannot be read (No such file"),
        ("ca=FILES/key.pem", "is not a PEM file of certificates"),
        ("cert=FILES/cert.pem", "cert and key go together"),
        ("key=FILES/key.pem", "cert and key go together"),
        ("cert=FILES/cert.pem&key=FILES/other-key.pem", "are not a matching PEM pair"),
        ("insecure=1", "key=FILE, login=FILE, each once; insecure does not fit"),
        ("ca=", "ca does not fit"),
        ("ca=FILES/cert.pem&ca=FILES/cert.pem", "ca does not fit"),
    ],
)
def test_bad_queries_are_refused(files: Path, query: str, complaint: str) -> None:
    url = f"https://me:s3cret@h:1?{query.replace('FILES', str(files))}"
    with pytest.raises(ConfigError) as failure:
        parse_etcd_url(url)
    (mistake,) = failure.value.mistakes
    assert mistake.startswith("etcd URL https://h:1: ")
    assert complaint in mistake
    assert "s3cret" not in mistake


def private(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def test_credentials_may_be_in_files(tmp_path: Path) -> None:
    login = private(tmp_path / "login", "me:p@ss:word\n")
    assert parse_etcd_url(f"http://h:1?login={login}") == ServerAddress(
        (("h", 1),), None, "me", "p@ss:word"
    )
    token = private(tmp_path / "token", "s3cret")
    address = parse_nats_url(f"nats://h:1?login={token}&inbox=_INBOX_a.b")
    assert address == ServerAddress((("h", 1),), token="s3cret", inbox="_INBOX_a.b")


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("login=FILES/missing", "missing cannot be read (No such file"),
        ("login=FILES/a%00b", "a%00b cannot be read (embedded null byte)"),
        ("login=FILES/open", "is open to other users: chmod 600"),
        ("login=FILES/empty", "needs one line, USER:PASSWORD"),
        ("login=FILES/lines", "needs one line, USER:PASSWORD"),
        ("creds=FILES/lines", "needs the JWT and the NKey seed of a user"),
        ("creds=FILES/jwt", "needs the JWT and the NKey seed of a user"),
        ("nkey=FILES/lines", "is not the seed of a user's NKey"),
        ("nkey=FILES/open", "is open to other users: chmod 600"),
        ("login=FILES/lines&nkey=FILES/lines", "several credentials (login, nkey); keep one"),
        ("inbox=a..b", "inbox is a subject"),
        ("inbox=%3E", "inbox is a subject"),
        ("inbox=mine", "inbox is a subject"),
    ],
)
def test_bad_files_of_credentials_are_refused(tmp_path: Path, query: str, complaint: str) -> None:
    (tmp_path / "open").write_text("me:s3cret")
    (tmp_path / "open").chmod(0o644)
    private(tmp_path / "empty", "\n")
    private(tmp_path / "lines", "me:s3cret\nyou:s3cret")
    private(tmp_path / "jwt", "-----BEGIN NATS USER JWT-----\ns3cret\n")
    with pytest.raises(ConfigError) as failure:
        parse_nats_url(f"nats://h:1?{query.replace('FILES', str(tmp_path))}")
    (mistake,) = failure.value.mistakes
    assert mistake.startswith("NATS URL nats://h:1: ") and complaint in mistake
    assert "s3cret" not in mistake


@pytest.mark.parametrize(
    ("parse", "url", "complaint"),
    [
        (parse_etcd_url, "http://h?login=/token", "login=/token cannot be read"),
        (parse_etcd_url, "http://me:s3cret@h?login=/x", "login and those before the @"),
        (parse_etcd_url, "http://h?creds=/x", "creds does not fit"),
        (parse_etcd_url, "", "expected http://HOST:PORT or https://HOST:PORT"),
        (parse_etcd_url, "nats://h", "expected http://HOST:PORT"),
        (parse_etcd_url, "http://a,,b", "expected http://HOST:PORT"),
        (parse_etcd_url, "http://h:x", "malformed"),
        (parse_etcd_url, "http://me:s3cret/x@h", "written as %XX"),
        (parse_etcd_url, "http://me:1,s3cret@h", "special characters as %XX"),
        (parse_etcd_url, "http://me:1?s3cret@h", "written as %3F"),
        (parse_etcd_url, "http://s3cret@h", "user and password go together"),
        (parse_etcd_url, "http://a,https://b", "the same scheme"),
        (parse_etcd_url, "http://me:s3cret@a,http://you:x@b", "different credentials"),
        (parse_etcd_url, "http://h?ca=/x", "certificates need TLS; write https://"),
        (parse_nats_url, "http://h", "expected nats://HOST:PORT or tls://HOST:PORT"),
        (parse_nats_url, "nats://h?ca=/x", "certificates need TLS; write tls://"),
    ],
)
def test_other_urls_are_refused(parse: Parse, url: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse(url)
    (mistake,) = failure.value.mistakes
    assert complaint in mistake
    assert "s3cret" not in mistake


def test_a_client_on_the_same_machine_uses_loopback() -> None:
    assert local_url("0.0.0.0", 5, tls=False) == "http://127.0.0.1:5"
    assert local_url("::", 5, tls=True) == "https://[::1]:5"
    assert local_url("10.0.0.12", 5, tls=False) == "http://10.0.0.12:5"


@pytest.mark.parametrize(
    ("bind_host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:5"),
        ("10.0.0.12", "10.0.0.12:5"),
        ("fd00::1", "[fd00::1]:5"),
        ("worker-1", "worker-1:5"),
        ("0.0.0.0", "node-7:5"),
        ("::", "node-7:5"),
        ("", "node-7:5"),
    ],
)
def test_a_server_on_all_interfaces_is_reached_by_the_hosts_name(
    monkeypatch: pytest.MonkeyPatch, bind_host: str, address: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
    assert advertised_address(bind_host, 5) == address
