"""The users that `dynamo-lite access etcd --make` makes, in a real etcd."""

import os
import subprocess
from pathlib import Path

import pytest

from dynamo_lite.cli import access
from dynamo_lite.cli.access import chosen, make_users
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.embedded import EmbeddedEtcd, program
from dynamo_lite.serve.run_state import RunState, write_run

PASSWORDS = {"root": "first", "n-Router": "second"}


def logins(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for user, password in (PASSWORDS | changed).items():
        path = folder / user
        path.write_text(f"{user}:{password}\n")
        path.chmod(0o600)
    return folder


def etcdctl(url: str, *words: str, user: str = "", password: str = "", typed: str = "") -> int:
    login = {"ETCDCTL_USER": user, "ETCDCTL_PASSWORD": password} if user else {}
    command = [program("etcdctl"), f"--endpoints={url}", *words]
    done = subprocess.run(
        command, env={**os.environ, **login}, input=typed, text=True, timeout=60, check=False
    )
    return done.returncode


async def test_users_of_a_call_that_ended_halfway_get_the_passwords_of_the_files(tmp_path: Path):
    """While authentication is off, etcd takes any password for right."""
    async with EmbeddedEtcd(tmp_path / "etcd") as etcd:
        for user in PASSWORDS:
            assert etcdctl(etcd.url, "user", "add", user, "--interactive=false", typed="old\n") == 0
        folder = logins(tmp_path / "logins")
        make_users(etcd.url, "n", chosen("n", ["Router"]), folder)
        for user, password in PASSWORDS.items():
            assert etcdctl(etcd.url, "user", "get", user, user=user, password=password) == 0
        assert etcdctl(etcd.url, "user", "get", "root", user="root", password="old") != 0
        # Authentication is on: made again, with another password.
        make_users(etcd.url, "n", chosen("n", ["Router"]), logins(folder, **{"n-Router": "third"}))
        assert etcdctl(etcd.url, "user", "get", "n-Router", user="n-Router", password="third") == 0


def test_a_password_that_etcdctl_would_cut_is_refused(tmp_path: Path):
    folder = logins(tmp_path / "logins", **{"n-Router": "two words"})
    with pytest.raises(ConfigError, match="n-Router: etcdctl reads a password to its first blank"):
        make_users("http://127.0.0.1:1", "n", chosen("n", ["Router"]), folder)


def test_etcd_is_reached_with_the_certificate_of_the_graph_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunState(
        pid=os.getpid(), started_at=0.0, graph="g", namespace="n", certificates="/certificates"
    )
    write_run(tmp_path, run)
    urls: list[str] = []
    monkeypatch.setattr(access, "make_users", lambda url, *_: urls.append(url))
    asked = "https://etcd.invalid:2379"
    for namespace in ("n", "other"):
        access.etcd(
            namespace=namespace,
            make=tmp_path,
            etcd_url=asked,
            state_dir=tmp_path,
            certificates=None,
        )
    assert ["Operator.pem" in url for url in urls] == [True, False]
