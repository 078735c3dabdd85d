"""What the manifests start in pods, on this host: NATS by its chart's values, and etcd."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dynamo_lite.runtime.certificates import with_files
from tests.conftest import running
from tests.deploy import nats_chart
from tests.deploy.command_lines import DEPLOY
from tests.deploy.containers import (
    Container,
    ShippedEtcd,
    ShippedNats,
    free_ports,
    make_secrets,
    together,
)
from tests.deploy.kustomize import Resource, build
from tests.ports import reserved_port
from tests.process.command import run
from tests.started import VLLM_PATIENCE_S

KUBERNETES = DEPLOY / "kubernetes"
_MEMBERS = range(3)


def with_components(folder: Path) -> Path:
    """An overlay of a user's own below `folder`: the demo model, and all components."""
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    mine = folder / "kubernetes" / "overlays" / "mine"
    mine.mkdir()
    components = sorted(path.name for path in (KUBERNETES / "components").iterdir())
    listed = ", ".join(f"../../components/{name}" for name in components)
    (mine / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [../cpu]\ncomponents: [{listed}]\n"
    )
    return mine


def of_kind(resources: list[Resource], kind: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] == kind]


def pod_of(workload: Resource) -> dict[str, Any]:
    """workload: a Deployment, a StatefulSet or a Job."""
    return workload["spec"]["template"]["spec"]


def container_of(workload: Resource) -> dict[str, Any]:
    [container] = pod_of(workload)["containers"]
    return container


def secret_of(volume: dict[str, Any]) -> str:
    """The Secret whose files are in a volume; empty if it has none."""
    return str(volume.get("secret", {}).get("secretName", ""))


def secret_folder(secrets: Path, name: str) -> Path:
    """Of which the page makes the Secret of this name."""
    [found] = [path for path in secrets.iterdir() if path.name.lower() == name]
    assert found.is_dir()
    return found


@dataclass(frozen=True)
class Cluster:
    """folder: where its pods and secrets are. addresses: see `Container`; those of NATS by name,
    which its servers compare."""

    folder: Path
    addresses: Mapping[str, str] = field(
        default_factory=lambda: {
            **free_ports(
                "nats:4222", *(f"etcd-{n}.etcd:{port}" for n in _MEMBERS for port in (2379, 2380))
            ),
            **{f"nats-{n}.nats-headless:6222": f"localhost:{reserved_port()}" for n in _MEMBERS},
        }
    )

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    def pod(
        self, name: str, workload: Resource, addresses: Mapping[str, str] | None = None
    ) -> Container:
        """Its root, with its Secrets and empty folders; made."""
        root = self.folder / "pods" / name
        mounts: dict[str, Path] = {}
        volumes = {one["name"]: one for one in pod_of(workload)["volumes"]}
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes |= {one["metadata"]["name"]: {"emptyDir": {}} for one in claims}
        for mount in container_of(workload)["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "emptyDir" in volume:
                mounts[path] = root / "volumes" / mount["name"]
            if secret := secret_of(volume):
                mounts[path] = secret_folder(self.secrets, secret)
        container = Container(root, mounts, {**self.addresses, **(addresses or {})})
        container.make()
        return container

    def nats(self) -> list[ShippedNats]:
        values = nats_chart.read_values(KUBERNETES / "nats-values.yaml")
        assert values["config"]["cluster"]["replicas"] == len(_MEMBERS)
        text = nats_chart.config_text(values)
        secrets = {
            path: secret_folder(self.secrets, name)
            for path, name in nats_chart.mounts(values).items()
        }
        return [self._nats_member(f"nats-{n}", text, secrets) for n in _MEMBERS]

    def _nats_member(self, name: str, text: str, secrets: Mapping[str, Path]) -> ShippedNats:
        root = self.folder / "pods" / name
        folders = {path: root / "volumes" / Path(path).name for path in ("/data", "/var/run/nats")}
        container = Container(root, {**secrets, **folders}, self.addresses)
        container.make()
        own = free_ports("http", "client")
        if name == "nats-0":
            # The Service chooses any of them.
            own["client"] = self.addresses["nats:4222"]
        cluster = self.addresses[f"{name}.nats-headless:6222"]
        for old, new in (
            ("$SERVER_NAME", name),
            ('"port": 6222', f'"port": {_port(cluster)}, "host": "127.0.0.1"'),
            ('"http_port": 8222', f'"http": "{own["http"]}", "host": "127.0.0.1"'),
        ):
            assert text.count(old) == 1
            text = text.replace(old, new)
        return ShippedNats(container, nats_chart.CONFIG, text, _port(own["client"]))

    def etcd(self) -> list[ShippedEtcd]:
        [workload] = of_kind(build(KUBERNETES / "planes"), "StatefulSet")
        assert workload["spec"]["replicas"] == len(_MEMBERS)
        return [self._etcd_member(f"etcd-{n}", workload) for n in _MEMBERS]

    def _etcd_member(self, name: str, workload: Resource) -> ShippedEtcd:
        own = free_ports("0.0.0.0:2381")
        own |= {f"0.0.0.0:{port}": self.addresses[f"{name}.etcd:{port}"] for port in (2379, 2380)}
        pod, container = self.pod(name, workload, own), container_of(workload)
        assert container["command"] == ["etcd"]
        arguments = [one.replace("$(POD_NAME)", name) for one in container["args"]]
        path = container["readinessProbe"]["httpGet"]["path"]

        def ready() -> bool:
            try:
                return httpx.get(f"http://{own['0.0.0.0:2381']}{path}", timeout=2).is_success
            except httpx.HTTPError:
                return False

        return ShippedEtcd(pod, arguments, ready, _port(own["0.0.0.0:2379"]))

    def environment(self, workload: Resource) -> dict[str, str]:
        """The URLs of a Deployment of the graph, with the certificate of its service."""
        pod, container = self.pod(workload["metadata"]["name"], workload), container_of(workload)
        given = {one["name"]: one.get("value", "") for one in container["env"]}
        arguments = dict(one.split("=", 1) for one in container["args"] if "=" in one)
        folder = Path(pod.here("=" + arguments["--Graph.certificates"])[1:])
        return {
            name: with_files(pod.here(given[name]), folder, arguments["--service-name"])
            for name in given
            if name.startswith("DYNAMO_LITE_")
        }

    def make_users(self) -> None:
        """What the Job `etcd-users` does."""
        [job] = of_kind(build(KUBERNETES / "planes"), "Job")
        pod = self.pod("etcd-users", job)
        command = [pod.here(argument) for argument in container_of(job)["args"]]
        done = run(*command, timeout_s=VLLM_PATIENCE_S)
        assert done.returncode == 0, done.stderr


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextmanager
def planes(folder: Path) -> Iterator[Cluster]:
    """Three NATS servers and three etcd members run, with their users."""
    cluster = Cluster(folder)
    make_secrets(cluster.secrets)
    with running(together(cluster.nats())), running(together(cluster.etcd())):
        cluster.make_users()
        yield cluster
