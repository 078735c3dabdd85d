"""The services of `deploy/compose.yaml`, on this host."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.serve.embedded import program
from tests.conftest import running
from tests.deploy.command_lines import DEPLOY
from tests.deploy.containers import Container, ShippedEtcd, ShippedNats, free_ports, make_secrets
from tests.process.command import run
from tests.started import VLLM_PATIENCE_S

#: The services of compose that are members of the graph, and the operator.
COMPONENTS = {
    "frontend": "Frontend",
    "decode": "VllmWorker",
    "prefill": "PrefillWorker",
    "operator": "Operator",
}


def read_compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@dataclass(frozen=True)
class Compose:
    """folder: where its containers and secrets are. addresses: see `Container`."""

    folder: Path
    content: Mapping[str, Any]
    addresses: Mapping[str, str]

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    def container(self, name: str) -> Container:
        """Its mounts: folders of secrets, configuration files, volumes and tmpfs."""
        service = self.content["services"][name]
        root = self.folder / "containers" / name
        mounts: dict[str, Path] = {}
        for one in service.get("configs", ()):
            mounts[one["target"]] = DEPLOY / self.content["configs"][one["source"]]["file"]
        for one in service.get("volumes", ()):
            if isinstance(one, str):
                mounts[one.partition(":")[2]] = root / "volumes" / one.partition(":")[0]
            else:
                assert one["read_only"] and not one["bind"]["create_host_path"]
                mounts[one["target"]] = self.secrets / Path(one["source"]).relative_to("secrets")
        for one in service.get("tmpfs", ()):
            mounts[one.partition(":")[0]] = root / "tmpfs" / Path(one.partition(":")[0]).name
        return Container(root, mounts, self.addresses)

    def command(self, name: str) -> list[str]:
        container = self.container(name)
        return [container.here(word) for word in self.content["services"][name]["command"]]

    def environment(self, name: str) -> dict[str, str]:
        variables = self.content["services"][name]["environment"]
        container = self.container(name)
        # A path may be the whole value.
        return {key: container.here(f"={value}")[1:] for key, value in variables.items()}

    def nats_url(self, name: str) -> str:
        """As the service's process has it: with its component's certificate and login."""
        return self._certified(name, "DYNAMO_LITE_NATS_URL")

    def etcd_url(self, name: str) -> str:
        return self._certified(name, "DYNAMO_LITE_ETCD_URL")

    def _certified(self, name: str, variable: str) -> str:
        folder = self.container(name).path("/etc/dynamo-lite-access")
        return with_files(self.environment(name)[variable], folder, COMPONENTS[name])

    def nats(self) -> ShippedNats:
        [_, config] = self.content["services"]["nats"]["command"]
        container = self.container("nats")
        content = container.mounts[config].read_text()
        # The file itself is written, changed, in place of a link to it.
        mounts = {path: source for path, source in container.mounts.items() if path != config}
        container = Container(container.root, mounts, self.addresses)
        container.make()
        return ShippedNats(container, config, content, self.port("nats:4222"))

    def etcd(self) -> ShippedEtcd:
        service = self.content["services"]["etcd"]
        [server, *arguments] = service["command"]
        [_, control, *health] = service["healthcheck"]["test"]
        assert (server, control) == ("etcd", "etcdctl")
        container = self.container("etcd")
        container.make()

        def ready() -> bool:
            asked = [program("etcdctl"), *map(container.here, health)]
            return subprocess.run(asked, capture_output=True, timeout=20).returncode == 0

        return ShippedEtcd(container, arguments, ready, self.port("etcd:2379"))

    def port(self, address: str) -> int:
        return int(self.addresses[address].rpartition(":")[2])

    def make_users(self) -> None:
        """What the container `etcd-users` does."""
        done = run(*self.command("etcd-users"), timeout_s=VLLM_PATIENCE_S)
        assert done.returncode == 0, done.stderr


def compose_at(folder: Path) -> Compose:
    """With secrets, and nothing that runs."""
    found = free_ports("nats:4222", "127.0.0.1:8222", "etcd:2379", "127.0.0.1:2380")
    found["0.0.0.0:2379"] = found["127.0.0.1:2379"] = found["etcd:2379"]
    compose = Compose(folder, read_compose(), found)
    make_secrets(compose.secrets)
    for name in compose.content["services"]:
        if name not in ("nats", "etcd"):
            compose.container(name).make()
    return compose


@contextmanager
def planes(folder: Path) -> Iterator[Compose]:
    """NATS and etcd run, with their users."""
    compose = compose_at(folder)
    with running(compose.nats()), running(compose.etcd()):
        compose.make_users()
        yield compose
