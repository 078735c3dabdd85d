"""`deploy/make-secrets`: what it makes, keeps and renews."""

import os
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509

from dynamo_lite.protocol.permissions import all_permissions
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.credentials import read_login
from tests.deploy.command_lines import DEPLOY
from tests.deploy.containers import COMMAND, make_secrets
from tests.process.command import run

NAMESPACE = "dynamo"
ADDRESSES = ("nats-1.example", "10.0.0.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests of this module only read it."""
    return make_secrets(tmp_path_factory.mktemp("secrets"), *ADDRESSES)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "secrets", symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_users_file_is_what_the_command_prints() -> None:
    shown = run("access", "nats", "--namespace", NAMESPACE)
    assert (DEPLOY / "nats-users.conf").read_text() == shown.stdout


def test_there_is_a_login_for_each_user(made: Path) -> None:
    known = set(all_permissions(NAMESPACE))
    services = {path.name.removeprefix("dynamo-lite-") for path in made.glob("dynamo-lite-*")}
    assert services == {*known, "Prometheus"}
    for name in services:
        Certificates(made / f"dynamo-lite-{name}", NAMESPACE, name)
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
        ["sh", deploy / "make-secrets"],
        env={**os.environ, "NAMESPACE": "other-1", "DYNAMO_LITE": COMMAND},
        check=True,
        timeout=120,
    )
    text = (deploy / "secrets" / "nats-users" / "users.conf").read_text()
    assert set(re.findall(r"^(\w+): ", text, re.MULTILINE)) == set(
        re.findall(r"password: \$(\w+)", text)
    )
    assert read_login(deploy / "secrets/dynamo-lite-Frontend/etcd-login")[0] == "other-1-Frontend"


def test_only_the_owner_reads_them(made: Path) -> None:
    for path in made.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o400)


@pytest.mark.parametrize("server", ["nats", "etcd"])
def test_servers_have_certificates_for_their_names_and_components_have_not(
    made: Path, server: str
) -> None:
    folder = made / f"{server}-tls"
    own = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    own.verify_directly_issued_by(x509.load_pem_x509_certificate((made / "ca.pem").read_bytes()))
    assert (folder / "ca.crt").read_bytes() == (made / "ca.pem").read_bytes()
    ssl.create_default_context().load_cert_chain(folder / "tls.crt", folder / "tls.key")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = set(names.get_values_for_type(x509.DNSName))
    assert {"localhost", server, "nats-1.example"} <= hosts
    addresses = {str(one) for one in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"127.0.0.1", "10.0.0.1"}
    for name in all_permissions(NAMESPACE):
        component = x509.load_pem_x509_certificate((made / f"{name}.pem").read_bytes())
        names = component.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["dynamo-lite-status"]


def test_what_is_there_is_kept(copied: Path) -> None:
    before = contents(copied)
    assert contents(make_secrets(copied, *ADDRESSES)) == before


def test_what_is_deleted_is_made_again(copied: Path) -> None:
    before = contents(copied)
    mounted = {path: (copied / path).stat().st_ino for path in ("nats-users", "etcd-tls")}
    (copied / "dynamo-lite-Frontend" / "nats-login").unlink()
    for name in ("etcd-server", "Router"):
        (copied / f"{name}.pem").unlink()
    after = contents(make_secrets(copied, *ADDRESSES))
    changed = {name for name in before if after[name] != before[name]}
    assert after.keys() == before.keys()
    assert changed == {
        *("dynamo-lite-Frontend/nats-login", "nats-users/users.conf"),
        *("etcd-server.pem", "etcd-server-key.pem", "etcd-tls/tls.crt", "etcd-tls/tls.key"),
        *("Router.pem", "Router-key.pem"),
        *("dynamo-lite-Router/Router.pem", "dynamo-lite-Router/Router-key.pem"),
    }
    # Containers have the folders mounted.
    assert {path: (copied / path).stat().st_ino for path in mounted} == mounted
