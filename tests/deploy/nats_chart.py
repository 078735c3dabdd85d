"""NATS' official chart, as far as `nats-values.yaml` uses it; the rest is refused.

What it renders was compared with the chart itself, version 2.14.2. helm is no dependency here.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kustomize import Resource, only

#: Of its pods, with the release `nats`.
LABELS = {
    "app.kubernetes.io/name": "nats",
    "app.kubernetes.io/instance": "nats",
    "app.kubernetes.io/component": "nats",
}
PORTS = {"nats": 4222, "cluster": 6222, "monitor": 8222, "prom-metrics": 7777}
CONFIG = "/etc/nats-config/nats.conf"
_CA = {"ca_file": "/etc/nats-ca-cert/ca.crt"}


def read_values(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def config_text(values: dict[str, Any]) -> str:
    """The file nats.conf. Raises ValueError for anything that this reader does not know."""
    given = values["config"]
    only(given, {"cluster", "nats", "jetstream", "merge"})
    only(given["cluster"], {"enabled", "replicas", "tls"})
    only(given["nats"], {"tls"})
    only(given["jetstream"], {"enabled", "fileStore"})
    only(given["jetstream"]["fileStore"], {"pvc"})
    assert given["cluster"]["enabled"] and given["jetstream"]["enabled"]
    config: dict[str, Any] = {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "pid_file": "/var/run/nats/nats.pid",
        "port": PORTS["nats"],
        "tls": _tls(given["nats"]["tls"], "nats"),
        "cluster": {
            "name": "nats",
            "port": PORTS["cluster"],
            "no_advertise": True,
            "routes": [
                f"tls://nats-{number}.nats-headless:{PORTS['cluster']}"
                for number in range(given["cluster"]["replicas"])
            ],
            "tls": _tls(given["cluster"]["tls"], "cluster"),
        },
        "http_port": PORTS["monitor"],
        "jetstream": {
            "max_memory_store": 0,
            "store_dir": "/data",
            "max_file_store": f"<< {given['jetstream']['fileStore']['pvc']['size']} >>",
        },
        **given["merge"],
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    text = re.sub(r'"[\w]*\$include": "([^"]*)",?', r"include \1;", text)
    return re.sub(r'"<< (.*?) >>"', r"\1", text)


def _tls(given: dict[str, Any], name: str) -> dict[str, Any]:
    only(given, {"enabled", "secretName", "merge"})
    folder = f"/etc/nats-certs/{name}"
    assert given["enabled"] and given["secretName"]
    pair = {"cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key"}
    return {**_CA, **pair, **given["merge"]}


def mounts(values: dict[str, Any]) -> dict[str, str]:
    """The Secret that is mounted at each path of the server."""
    only(values, {"config", "tlsCA", "container", "podTemplate", "promExporter", "natsBox"})
    only(values["tlsCA"], {"enabled", "secretName"})
    found = {
        "/etc/nats-ca-cert": values["tlsCA"]["secretName"],
        "/etc/nats-certs/nats": values["config"]["nats"]["tls"]["secretName"],
        "/etc/nats-certs/cluster": values["config"]["cluster"]["tls"]["secretName"],
    }
    [volume] = _added(values["podTemplate"]["patch"], "/spec/volumes/-")
    [mount] = _added(values["container"]["patch"], "/volumeMounts/-")
    assert mount["name"] == volume["name"]
    return found | {mount["mountPath"]: volume["secret"]["secretName"]}


def _added(patch: list[dict[str, Any]], path: str) -> list[Resource]:
    assert all((one["op"], one["path"]) == ("add", path) for one in patch)
    return [one["value"] for one in patch]
