"""A nats-server and an etcd whose users have just the rights that `dynamo-lite access` prints."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_lite.cli.access import etcd_commands, nats_account, password_variable, user_of
from dynamo_lite.protocol.permissions import all_permissions, inbox_of
from dynamo_lite.serve.embedded import EmbeddedEtcd, program
from dynamo_lite.serve.run_state import write_private
from tests.conftest import running
from tests.external import TlsNats

PASSWORD = "s3cret"
#: A graph on the same servers, whose users have the rights of its components, too.
FOREIGN = "foreign-1"
#: etcdctl as a person uses it, who types each new user's password.
_TYPING = f"""
set -e
etcdctl() {{
    case "$1 $2" in
    "user add") echo {PASSWORD} | "$ETCDCTL" user add "$3" --interactive=false ;;
    *) "$ETCDCTL" "$@" ;;
    esac
}}
"""
_ROOT = "etcdctl user add root; etcdctl user grant-role root root; etcdctl auth enable"


class LeastRights:
    def __init__(self, directory: Path, namespace: str, nats: str, etcd: str):
        self._directory, self._namespace, self.nats, self._etcd = directory, namespace, nats, etcd

    def options(self, component: str) -> list[str]:
        """Of `dynamo-lite`, for what runs as this component."""
        return ["--nats-url", self.nats_url(component), "--etcd-url", self.etcd_url(component)]

    def foreign(self) -> "LeastRights":
        """The users of the other graph."""
        return LeastRights(self._directory, FOREIGN, self.nats, self._etcd)

    def nats_url(self, component: str) -> str:
        user = user_of(self._namespace, component)
        return f"{self.nats}?login={self._login(user)}&inbox={inbox_of(user)}"

    def etcd_url(self, component: str) -> str:
        return f"{self._etcd}?login={self._login(user_of(self._namespace, component))}"

    def violations(self) -> list[str]:
        """What nats-server has refused."""
        log = (self._directory / "nats" / "nats-server.log").read_text(errors="replace")
        return [line for line in log.splitlines() if "violation" in line.lower()]

    def _login(self, user: str) -> Path:
        path = self._directory / user
        write_private(path, f"{user}:{PASSWORD}\n".encode())
        return path


@contextmanager
def least_rights(directory: Path, namespace: str) -> Iterator[LeastRights]:
    graphs = {name: all_permissions(name).values() for name in (namespace, FOREIGN)}
    for name, permissions in graphs.items():
        for each in permissions:
            os.environ[password_variable(user_of(name, each.component))] = PASSWORD
    broker = TlsNats(directory / "nats")
    accounts = "".join(nats_account(name, permissions) for name, permissions in graphs.items())
    broker.extra = f"accounts {{\n{accounts}}}\n"
    commands = "".join(etcd_commands(name, permissions) for name, permissions in graphs.items())
    with running(broker) as nats, running(EmbeddedEtcd(directory / "etcd")) as etcd:
        subprocess.run(
            ["sh", "-c", f"{_TYPING}{commands}{_ROOT}"],
            env={**os.environ, "ETCDCTL": program("etcdctl"), "ETCDCTL_ENDPOINTS": etcd},
            check=True,
            capture_output=True,
            timeout=120,
        )
        yield LeastRights(directory, namespace, nats, etcd)
