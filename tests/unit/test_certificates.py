"""The certificate folder of a graph: made, checked, loaded, and read again."""

import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.serve.certificate_folder import make_certificates
from tests.certificate_folders import NAMESPACE, expire, graph_folder, of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return graph_folder(tmp_path / "certificates")


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[ssl.SSLObject, ...]:
    """The two ends, in memory. Raises SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(down, up, server_hostname="anything"),
        server.wrap_bio(up, down, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    ends[0].write(b"x")
    assert ends[1].read(1) == b"x"
    return ends


def leaf(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def test_a_stranger_gets_no_connection(folder: Path, tmp_path: Path):
    worker = of(folder, "VllmWorker")
    stranger = of(graph_folder(tmp_path / "other"), "Frontend")
    with pytest.raises(ssl.SSLError) as untrusting:
        handshake(stranger.client(), worker.server())
    assert str(folder) not in (said := stranger.explained(untrusting.value))
    assert f"not valid under {tmp_path / 'other' / 'ca.pem'}: " in said
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError) as nothing:
        handshake(bare, worker.server())
    assert worker.explained(nothing.value) == "it shows no certificate"
    _, at_worker = handshake(bare, worker.open_server())
    assert worker.refusal(at_worker) == "it shows no certificate"
    assert stranger.files.cert is not None
    bare.load_cert_chain(stranger.files.cert, stranger.files.key)
    for context in (worker.server(), worker.open_server()):
        with pytest.raises(ssl.SSLError) as another:
            handshake(bare, context)
        assert f"not valid under {folder / 'ca.pem'}: " in worker.explained(another.value)
    assert worker.explained(ConnectionResetError("reset")) == ""


def test_only_tls_1_3(folder: Path):
    old = of(folder, "Frontend").client()
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(old, of(folder, "VllmWorker").server())


def test_what_is_there_is_kept_and_what_is_made_is_private(folder: Path):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in before} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_certificates(folder, NAMESPACE, ["Frontend", "Mine"], ["a.example", "::1"]) == [
        "Mine"
    ]
    (folder / "Frontend-key.pem").unlink()
    assert make_certificates(folder, NAMESPACE, ["Frontend", "Mine"]) == ["Frontend"]
    kept = {path: old for path, old in before.items() if not path.name.startswith("Frontend")}
    assert {path: path.read_bytes() for path in kept} == kept
    of(folder, "Frontend")


def test_a_certificate_has_no_common_name_and_the_named_hosts(tmp_path: Path):
    make_certificates(tmp_path, NAMESPACE, ["Frontend"], ["a.example", "10.0.0.1", "::1"])
    made = leaf(tmp_path, "Frontend")
    assert not made.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == [
        "dynamo-lite://n/Frontend",
        *("a.example", "10.0.0.1", "::1"),
    ]
    make_certificates(tmp_path, NAMESPACE, ["nats-server"], ["nats"], servers=True)
    with pytest.raises(ConfigError, match=r"nats-server.pem: its certificate is of no component"):
        of(tmp_path, "nats-server")
    days = made.not_valid_after_utc - made.not_valid_before_utc
    authority = leaf(tmp_path, "ca")
    assert days.days == 730
    assert (authority.not_valid_after_utc - authority.not_valid_before_utc).days == 3650


def test_without_the_authority_s_key_nothing_is_made(folder: Path, tmp_path: Path):
    (folder / "ca-key.pem").unlink()
    assert make_certificates(folder, NAMESPACE, ["Frontend"]) == []
    with pytest.raises(ConfigError, match=r"ca-key\.pem is missing: make the certificates where"):
        make_certificates(folder, NAMESPACE, ["Mine"])
    shutil.copy(folder / "Frontend-key.pem", folder / "ca-key.pem")
    with pytest.raises(ConfigError, match="not a matching pair"):
        make_certificates(folder, NAMESPACE, ["Mine"])
    (folder / "ca-key.pem").write_text("x")
    with pytest.raises(ConfigError, match="not a certificate and its key"):
        make_certificates(folder, NAMESPACE, ["Mine"])
    with pytest.raises(ConfigError, match="not a host name"):
        make_certificates(tmp_path / "new", NAMESPACE, ["Mine"], ["ö"])
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot make certificates in"):
        make_certificates(tmp_path / "file", NAMESPACE, ["Mine"])


def _swap_authority(folder: Path) -> None:
    shutil.copy(graph_folder(folder.parent / "other") / "ca.pem", folder / "ca.pem")


def _swap_key(folder: Path) -> None:
    shutil.copy(folder / "Router-key.pem", folder / "Frontend-key.pem")


def _swap_pair(folder: Path) -> None:
    for end in (".pem", "-key.pem"):
        shutil.copy(folder / f"Router{end}", folder / f"Frontend{end}")


def _of_another_graph(folder: Path) -> None:
    shutil.copytree(graph_folder(folder.parent / "other", "n2"), folder, dirs_exist_ok=True)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "Frontend.pem").unlink(), "/Frontend.pem cannot be read (No such"),
    "no key": (lambda f: (f / "Frontend-key.pem").unlink(), "/Frontend-key.pem cannot be read"),
    "no ca": (lambda f: (f / "ca.pem").unlink(), "/ca.pem cannot be read (No such file"),
    "noise": (lambda f: (f / "Frontend.pem").write_text("x"), "not a matching PEM pair"),
    "key is noise": (lambda f: (f / "Frontend-key.pem").write_text("x"), "not a matching PEM pair"),
    "ca is noise": (lambda f: (f / "ca.pem").write_text("x"), "/ca.pem is not a PEM file of"),
    "other key": (_swap_key, "/Frontend-key.pem are not a matching PEM pair"),
    "open": (lambda f: (f / "Frontend-key.pem").chmod(0o644), "is open to other users: chmod 600"),
    "expired": (
        lambda f: expire(f, "Frontend"),
        "/ca.pem: certificate has expired; remove it and its key, and make new ones",
    ),
    "not yet": (lambda f: expire(f, "Frontend", days=9), "certificate is not yet valid"),
    "other authority": (_swap_authority, "Frontend.pem: its certificate is not valid under "),
    "other component": (
        _swap_pair,
        "its certificate is of dynamo-lite://n/Router, not of dynamo-lite://n/Frontend",
    ),
    "other graph": (
        _of_another_graph,
        "its certificate is of dynamo-lite://n2/Frontend, not of dynamo-lite://n/Frontend",
    ),
    "old authority": (lambda f: expire(f, "ca"), "/ca.pem: certificate has expired"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_and_the_good_ones_stay_in_use(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
):
    spoil, expected = BAD[name]
    running = of(folder, "Frontend")
    before = running.client()
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        of(folder, "Frontend")
    [mistake] = caught.value.mistakes
    assert f"{folder}/" in mistake and expected in mistake
    if name == "open":
        return  # its content is as it was
    assert running.client() is before and running.client() is before
    [record] = caplog.records
    assert record.getMessage() == f"{mistake.rstrip('.')}; what was read before stays in use"


def test_an_authority_is_replaced_through_a_file_with_both(folder: Path, tmp_path: Path):
    worker, new = of(folder, "VllmWorker"), graph_folder(tmp_path / "new")
    both = (folder / "ca.pem").read_bytes() + (new / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes(both)
    (new / "ca.pem").write_bytes(both)
    frontend = of(new, "Frontend")
    at_frontend, at_worker = handshake(frontend.client(), worker.server())
    assert frontend.refusal(at_frontend, "VllmWorker") == worker.refusal(at_worker, "Frontend")


def test_links_are_followed_as_kubernetes_changes_them(folder: Path, tmp_path: Path):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    second = graph_folder(tmp_path / "second")
    (mounted / "data").symlink_to(folder)
    for name in ("ca.pem", "Frontend.pem", "Frontend-key.pem"):
        (mounted / name).symlink_to(Path("data") / name)
    frontend = of(mounted, "Frontend")
    before = frontend.client()
    (tmp_path / "next").symlink_to(second)
    os.replace(tmp_path / "next", mounted / "data")
    assert frontend.client() is not before


def test_a_url_gets_the_component_s_files_unless_it_names_its_own(tmp_path: Path):
    own = f"cert={tmp_path}/Router.pem&key={tmp_path}/Router-key.pem"
    all_three = f"ca={tmp_path}/ca.pem&{own}"
    for url, expected in (
        ("nats://a", "nats://a"),
        ("http://a?login=x", "http://a?login=x"),
        ("tls://a,b:1", f"tls://a,b:1?{all_three}"),
        ("https://a?login=/x", f"https://a?login=/x&{all_three}"),
        ("tls://a?ca=/other", f"tls://a?ca=/other&{own}"),
        ("tls://a?cert=/c&key=/k", f"tls://a?cert=/c&key=/k&ca={tmp_path}/ca.pem"),
    ):
        assert with_files(url, tmp_path, "Router") == expected
        assert with_files(url, None, "Router") == url
    assert "ca=/a%20b%26/ca.pem" in with_files("tls://a", Path("/a b&"), "Router")
