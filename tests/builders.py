"""What many tests build: records, specs, requests, jobs, metadata, a clock, a limited wait."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig, PrefillEngineConfig
from dynamo_lite.disagg.messages import BlockWrite, DecodeStep, WritingAttempt
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode_json
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import (
    EndpointRecord,
    EndpointTransport,
    EngineMetadata,
    KvRegion,
    RankMetadata,
)
from dynamo_lite.runtime.claim_cells import Cell
from dynamo_lite.runtime.drops import uncounted
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.component import ProcessSpec
from dynamo_lite.runtime.store import Lease, Store
from dynamo_lite.serve.run_state import RunState, lock, write_run

#: The default namespace and engine id here.
NAMESPACE, ENGINE = "t", "e1"
#: The claim of attempts whose claim does not matter, and its cell.
CLAIM = 7
HELD = Cell(0, CLAIM)


async def eventually(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    """Returns what `condition` gave once that is true; it may be a coroutine function. Raises
    TimeoutError after `within_s` seconds of the event loop, which are virtual in a virtual loop."""
    async with asyncio.timeout(within_s):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.002)


async def members_when(
    roster: Roster, accept: Callable[[Members], bool], within_s: float
) -> Members:
    """The members once `accept` takes them. Raises as `eventually`."""
    await eventually(lambda: accept(roster.members), within_s)
    return roster.members


def loop_time() -> float:
    return asyncio.get_running_loop().time()


class ManualClock:
    """Both clocks of a process, moved by the test."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1e9


def endpoint_record(
    lease_id: int = 1,
    component: str = "VllmWorker",
    endpoint: str = "generate",
    *,
    namespace: str = NAMESPACE,
    subject: str = "",
    stream: str | None = None,
    tls: bool = False,
    wire_version: int = WIRE_VERSION,
    **fields: Any,
) -> EndpointRecord:
    """A registered component. subject: where it takes requests; the usual one if it is empty."""
    usual = names.endpoint_subject(namespace, component, endpoint, lease_id)
    return EndpointRecord(
        component=component,
        endpoint=endpoint,
        namespace=namespace,
        lease_id=lease_id,
        transport=EndpointTransport(nats_tcp=subject or usual, stream=stream, tls=tls),
        wire_version=wire_version,
        **fields,
    )


def key_of(record: EndpointRecord) -> str:
    return names.endpoint_key(record.namespace, record.component, record.endpoint, record.lease_id)


async def register(store: Store, record: EndpointRecord, *, lease: Lease | None = None) -> str:
    """Writes the record into the store. Returns its key."""
    await store.put(key_of(record), encode_json(record), lease=lease)
    return key_of(record)


def process_spec(component: str, **changes: Any) -> ProcessSpec:
    """The component's first process. It has no servers and no state directory."""
    fields: dict[str, Any] = {
        "namespace": NAMESPACE,
        "instance": 0,
        "nats_url": "",
        "etcd_url": "",
        "state_dir": "",
    }
    return ProcessSpec(component=component, **(fields | changes))


def fake_host(messaging: Messaging, namespace: str, lease_id: int) -> Any:
    """Of a Frontend, for its `RemoteRouter`."""
    return SimpleNamespace(
        spec=process_spec("Frontend", namespace=namespace),
        messaging=messaging,
        lease=SimpleNamespace(id=lease_id),
        registry=CollectorRegistry(),
        drops=uncounted,
    )


def rank_metadata() -> RankMetadata:
    """A rank with one layer in main memory."""
    region = KvRegion(layer="0", base=4096, stride_bytes=64, block_bytes=64)
    return RankMetadata(agent=b"", memory="DRAM", device=0, regions=(region,))


PREFILL_ROLE = PrefillEngineConfig(cells_path="", min_prefix_read_length=8, queue=QueueConfig())
DECODE_ROLE = DecodeEngineConfig(
    options=DisaggOptions(), prefill_component="PrefillWorker", queue=QueueConfig()
)


def engine_config(role: DecodeEngineConfig | PrefillEngineConfig, **changes: Any) -> EngineConfig:
    made = {"namespace": NAMESPACE, "engine_id": ENGINE, "lease_id": 1, "lease_ttl_s": 5.0}
    return EngineConfig(**{**made, "nats_url": "", "etcd_url": "", "role": role, **changes})


def engine_metadata(engine_id: str = ENGINE, lease_id: int = 1, **changes: Any) -> EngineMetadata:
    """Eight blocks of four tokens, and no rank."""
    fields: dict[str, Any] = {
        "fingerprint": {},
        "block_size_tokens": 4,
        "num_blocks": 8,
        "ranks": (),
    }
    return EngineMetadata(engine_id=engine_id, lease_id=lease_id, **(fields | changes))


def prefill_job(attempt: str = "a1", **changes: Any) -> RemotePrefillRequest:
    """Ten tokens, of which the decode engine has the first four: one block. Its deadline is far."""
    fields: dict[str, Any] = {
        "engine_id": ENGINE,
        "request_id": f"r-{attempt}",
        "prompt_token_ids": list(range(10)),
        "num_computed_tokens": 4,
        "block_ids": [5, 6],
        "deadline": 2e9,
    }
    return RemotePrefillRequest(attempt=attempt, **(fields | changes))


def always_held(_cell: Cell) -> float:
    """An `Until` of claims that never end."""
    return math.inf


def block_write(attempt: str, local: list[int], remote: list[int], **more: Any) -> BlockWrite:
    own: dict[str, Any] = {"cell": HELD, **more}
    own = {field.name: own[field.name] for field in fields(WritingAttempt) if field.name in own}
    rest = {name: value for name, value in more.items() if name not in own}
    return BlockWrite(WritingAttempt(attempt, **own), local, remote, **rest)


def expecting(expect: Mapping[str, str], **more: Any) -> DecodeStep:
    """A step that awaits these attempts under `CLAIM`. expect: request id by attempt."""
    return DecodeStep(expect=dict(expect), claims=dict.fromkeys(expect, CLAIM), **more)


def generate_request(request_id: str = "a", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "sampling": b"\x80",
        "arrival_time": 1.0,
    }
    return GenerateRequest(request_id=request_id, **(fields | changes))


@contextmanager
def running_here(state_dir: Path, run: RunState) -> Iterator[None]:
    """A graph's state directory while it runs. Its `run.json` stays, as that of one killed."""
    with ExitStack() as stack:
        assert lock(state_dir, stack)
        write_run(state_dir, run)
        yield
