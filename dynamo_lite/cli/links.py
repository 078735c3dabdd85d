"""Which prefill worker gives KV to which decode engine, as etcd knows it."""

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_lite.cli.listing import Place, table
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.records import EndpointRecord, EngineMetadata, LinkRecord, decode_engine

_COLUMNS = ("prefill", "decode", "state", "lanes", "first_contact", "round_trip", "detail")
_NOTHING = "-"


async def link_rows(place: Place) -> list[dict[str, Any]]:
    """Plain values for display: every live prefill worker with every decode engine.

    Raises Unavailable when etcd does not answer.
    """
    from dynamo_lite.runtime.etcd.store import EtcdStore

    async with EtcdStore(place.etcd_url, connect_timeout_s=3.0) as store:
        prefix = names.endpoint_prefix(place.namespace, "PrefillWorker", "prefill")
        workers = await store.get_prefix(prefix)
        engines = await store.get_prefix(names.nixl_metadata_prefix(place.namespace))
        links = await store.get_prefix(names.links_prefix(place.namespace))
    return as_link_rows(
        [record.lease_id for record in _decoded(workers, EndpointRecord)],
        _engines(engines),
        list(_decoded(links, LinkRecord)),
    )


def as_link_rows(
    prefill_leases: Iterable[int], engines: Iterable[EngineMetadata], links: Iterable[LinkRecord]
) -> list[dict[str, Any]]:
    """Times in seconds; None of a pair of which nothing is known."""
    known = {(link.prefill_lease_id, link.engine_id): link for link in links}
    pairs = [(lease_id, engine) for lease_id in prefill_leases for engine in engines]
    return [_row(lease, engine, known.get((lease, engine.engine_id))) for lease, engine in pairs]


def as_link_table(rows: list[dict[str, Any]]) -> str:
    """The pairs, and for each decode engine how many prefill workers it can use."""
    lines = [table(_COLUMNS, [_cells(row) for row in rows])]
    engines = {row["engine"]: row["decode"] for row in rows}
    for engine, decode in engines.items():
        states = [row["state"] for row in rows if row["engine"] == engine]
        usable = sum(state != "failed" for state in states)
        lines.append(f"decode {decode}: {usable} of {len(states)} prefill workers usable")
    return "\n".join(lines)


def _row(lease_id: int, engine: EngineMetadata, link: LinkRecord | None) -> dict[str, Any]:
    return {
        "prefill": f"{lease_id:x}",
        "decode": f"{engine.lease_id:x}",
        "engine": engine.engine_id,
        "state": "untested" if link is None else "ok" if link.ok else "failed",
        "lanes": link and (link.lanes or None),
        "first_contact_s": link and (link.contact_s or None),
        "round_trip_s": link and (link.round_trip_s or None),
        "detail": link.detail if link else "",
        "checked_at": link and link.checked_at,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["prefill"],
        row["decode"],
        row["state"],
        _NOTHING if row["lanes"] is None else str(row["lanes"]),
        _time(row["first_contact_s"]),
        _time(row["round_trip_s"]),
        row["detail"],
    ]


def _time(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{seconds * 1000:.1f} ms"


def _decoded(entries: Mapping[str, bytes], kind: type[Any]) -> Iterable[Any]:
    """Malformed ones are left out."""
    for _, value in sorted(entries.items()):
        try:
            yield decode_json(value, kind)
        except ProtocolError:
            continue


def _engines(entries: Mapping[str, bytes]) -> list[EngineMetadata]:
    found: list[EngineMetadata] = []
    for _, value in sorted(entries.items()):
        try:
            found.append(decode_engine(value))
        except ProtocolError:
            continue
    return sorted(found, key=lambda engine: (engine.lease_id, engine.engine_id))
