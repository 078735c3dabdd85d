"""The live members of a namespace, as etcd knows them."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ConfigError, ProtocolError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.serve.run_state import read_run

_COLUMNS = ("component", "endpoint", "lease", "pid", "host", "status_url", "age")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a namespace lives."""

    etcd_url: str
    namespace: str


def find_place(state_dir: Path, etcd_url: str | None, namespace: str | None) -> Place:
    """Flags first, then the running graph of `state_dir`. Raises StartupError."""
    running = read_run(state_dir)
    url = etcd_url or (running.etcd if running else None)
    if url is None:
        raise StartupError(f"no graph runs on {state_dir}; name a server with --etcd-url")
    if namespace is None:
        namespace = running.namespace if running else "dynamo"
    if not names.is_namespace(namespace):
        raise ConfigError([f"--namespace {namespace}: not a namespace"])
    return Place(etcd_url=url, namespace=namespace)


async def members(place: Place) -> list[EndpointRecord]:
    """Every endpoint of every live process, sorted by key; malformed ones left out.

    Raises StartupError or Unavailable when etcd does not answer.
    """
    from dynamo_lite.runtime.etcd import EtcdStore

    async with EtcdStore(place.etcd_url, connect_timeout_s=3.0) as store:
        entries = await store.get_prefix(names.components_prefix(place.namespace))
    found: list[EndpointRecord] = []
    for _, value in sorted(entries.items()):
        try:
            found.append(decode_json(value, EndpointRecord))
        except ProtocolError:
            continue
    return found


def as_rows(records: list[EndpointRecord]) -> list[dict[str, Any]]:
    """Plain values for display; age in seconds."""
    now = time.time()
    return [
        {
            "component": record.component,
            "endpoint": record.endpoint,
            "lease": f"{record.lease_id:x}",
            "pid": record.pid,
            "host": record.host,
            "status_url": record.status_url,
            "age": round(max(0.0, now - record.started_at), 1),
        }
        for record in records
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        tuple(name.upper().replace("_", " ") for name in _COLUMNS),
        *(tuple(_cell(row, name) for name in _COLUMNS) for row in rows),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _cell(row: dict[str, Any], name: str) -> str:
    if name != "age":
        return str(row[name])
    seconds = int(row["age"])
    if seconds < 120:
        return f"{seconds}s"
    return f"{seconds // 60}m" if seconds < 7200 else f"{seconds // 3600}h"
