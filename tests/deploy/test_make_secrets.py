"""`deploy/make-secrets`: what it makes, keeps and renews."""

import re
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.credentials import read_login
from dynamo_lite.runtime.secret import GraphSecret
from tests.deploy.command_lines import DEPLOY
from tests.deploy.containers import make_secrets
from tests.process.command import run

NAMESPACE = "dynamo"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests of this module only read it."""
    return make_secrets(tmp_path_factory.mktemp("secrets"), "nats-1.example", "10.0.0.1")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())


def test_the_users_file_is_what_the_command_prints() -> None:
    shown = run("access", "nats", "--namespace", NAMESPACE)
    assert (DEPLOY / "nats-users.conf").read_text() == shown.stdout


def test_there_is_a_login_for_each_user(made: Path) -> None:
    known = set(all_permissions(NAMESPACE))
    logins = {path.name.removeprefix("dynamo-lite-") for path in made.glob("dynamo-lite-[A-Z]*")}
    assert logins == known
    users = {path.name for path in (made / "etcd-users").iterdir()}
    assert users == {"root", *(f"{NAMESPACE}-{name}" for name in known)}
    passwords = [read_login(path) for path in made.rglob("*-login")]
    assert len({password for _, password in passwords}) == len(passwords) == 2 * len(known) + 1


def test_another_namespace_has_users_of_its_own(tmp_path: Path) -> None:
    """With the users that the command prints for it, beside the script."""
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    (deploy / "make-secrets").write_bytes((DEPLOY / "make-secrets").read_bytes())
    printed = run("access", "nats", "--namespace", "other-1").stdout
    (deploy / "nats-users.conf").write_text(printed)
    subprocess.run(
        ["sh", deploy / "make-secrets"], env={"NAMESPACE": "other-1"}, check=True, timeout=60
    )
    text = (deploy / "secrets" / "nats-users" / "users.conf").read_text()
    assert set(re.findall(r"^(\w+): ", text, re.MULTILINE)) == set(
        re.findall(r"password: \$(\w+)", text)
    )
    assert read_login(deploy / "secrets/dynamo-lite-Frontend/etcd-login")[0] == "other-1-Frontend"


def test_only_the_owner_reads_them(made: Path) -> None:
    for path in made.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o400)
    GraphSecret(made / "dynamo-lite-graph" / "secret")


@pytest.mark.parametrize(
    ("folder", "authority", "usages"),
    [
        ("nats-tls", "nats", {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        ("etcd-tls", "etcd", {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}),
        ("dynamo-lite-tls", "etcd", {ExtendedKeyUsageOID.CLIENT_AUTH}),
    ],
)
def test_certificates_are_for_what_they_are_named_for(
    made: Path, folder: str, authority: str, usages: set[x509.ObjectIdentifier]
) -> None:
    own = certificate(made / folder)
    issuer = x509.load_pem_x509_certificate((made / f"{authority}-ca.crt").read_bytes())
    own.verify_directly_issued_by(issuer)
    assert (made / folder / "ca.crt").read_bytes() == (made / f"{authority}-ca.crt").read_bytes()
    assert set(own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == usages
    ssl.create_default_context().load_cert_chain(
        made / folder / "tls.crt", made / folder / "tls.key"
    )
    common = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert [one.value for one in common] == {"nats-tls": ["nats"], "etcd-tls": ["etcd"]}.get(
        folder, []
    )
    if folder != "dynamo-lite-tls":
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert {"localhost", "nats-1.example"} <= set(names.get_values_for_type(x509.DNSName))
        addresses = {str(one) for one in names.get_values_for_type(x509.IPAddress)}
        assert addresses == {"127.0.0.1", "10.0.0.1"}


def test_what_is_there_is_kept_and_what_is_deleted_is_made_anew(tmp_path: Path) -> None:
    before = contents(make_secrets(tmp_path))
    assert contents(make_secrets(tmp_path)) == before
    login, folder = tmp_path / "dynamo-lite-Frontend" / "nats-login", tmp_path / "etcd-tls"
    mounted = {path: (tmp_path / path).stat().st_ino for path in ("nats-users", "etcd-tls")}
    login.unlink()
    for path in folder.iterdir():
        path.unlink()
    after = contents(make_secrets(tmp_path))
    changed = {name for name in before if after[name] != before[name]}
    assert after.keys() == before.keys()
    assert changed == {
        *("dynamo-lite-Frontend/nats-login", "nats-users/users.conf"),
        *("etcd-tls/tls.crt", "etcd-tls/tls.key"),
    }
    # Containers have the folders mounted.
    assert {path: (tmp_path / path).stat().st_ino for path in mounted} == mounted
