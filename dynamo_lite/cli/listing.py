"""The live members of a namespace, as etcd knows them, and what they say of themselves."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_lite.overview import state_of
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ConfigError, ProtocolError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.serve.run_state import read_run

_COLUMNS = ("component", "endpoint", "lease", "pid", "host", "status_url", "state", "age")
#: For one member to say how it is; a stopped one does not.
_ANSWER_S = 1.0
_MAX_ANSWER_BYTES = 1 << 16


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
    from dynamo_lite.runtime.etcd.store import EtcdStore

    async with EtcdStore(place.etcd_url, connect_timeout_s=3.0) as store:
        entries = await store.get_prefix(names.components_prefix(place.namespace))
    found: list[EndpointRecord] = []
    for _, value in sorted(entries.items()):
        try:
            found.append(decode_json(value, EndpointRecord))
        except ProtocolError:
            continue
    return found


async def states(records: list[EndpointRecord]) -> dict[str, str]:
    """Status URL to what its process says of itself: "ready"; "starting" or "draining";
    "unwell" when it cannot work; "silent" when it does not answer."""
    urls = sorted({record.status_url for record in records})
    return dict(
        zip(urls, await asyncio.gather(*(asyncio.to_thread(_ask, u) for u in urls)), strict=True)
    )


def health(status_url: str) -> dict[str, Any]:
    """What a process says at /health; empty when it does not answer."""
    try:
        facts = json.loads(_health(status_url))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return facts if isinstance(facts, dict) else {}


def _ask(status_url: str) -> str:
    return state_of(health(status_url))


def _health(status_url: str) -> bytes:
    """Raises OSError, ValueError or HTTPException when there is no answer; 503 is one."""
    if not status_url.startswith("http://"):
        raise ValueError("not a status server's address")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer = opener.open(f"{status_url}/health", timeout=_ANSWER_S)
    except urllib.error.HTTPError as refusal:
        answer = refusal
    with answer:
        return answer.read(_MAX_ANSWER_BYTES)


def as_rows(records: list[EndpointRecord], states: dict[str, str]) -> list[dict[str, Any]]:
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
            "state": states[record.status_url],
            "age": round(max(0.0, now - record.started_at), 1),
        }
        for record in records
    ]


def as_table(rows: list[dict[str, Any]]) -> str:
    return table(_COLUMNS, [[_cell(row, name) for name in _COLUMNS] for row in rows])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned lines under headings."""
    cells = [[name.upper().replace("_", " ") for name in columns], *rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
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
