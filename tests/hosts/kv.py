"""Real engines on hosts: what a plain engine says, and their blocks."""

from collections.abc import Callable
from pathlib import Path

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import EngineStatus, decode_engine_status
from dynamo_lite.protocol.records import decode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.open import open_messaging
from tests.builders import eventually
from tests.chaos.arena import reference
from tests.hosts.load import Known, streamed
from tests.hosts.rig import NAMESPACE, Rig
from tests.vllm.asking import prompt_ids

_REST_S = 240.0
_TOKENS = 24
#: The last three are long enough for a remote prefill.
_PROMPTS = (40, 400, 900, 1500)


async def plain_answers(directory: Path, say: Callable[[str], None]) -> Known:
    """What one plain engine says."""
    asked = [
        streamed(f"prompt-{length}", prompt_ids(length, seed=length), _TOKENS)
        for length in _PROMPTS
    ]
    return Known(*await reference(directory, say, asked))


async def engines(rig: Rig) -> list[EngineStatus]:
    """What the decode engines say of themselves. Raises DynamoLiteError."""
    async with EtcdStore(rig.etcd.url) as store:
        found = await store.get_prefix(names.nixl_metadata_prefix(NAMESPACE))
    async with open_messaging(rig.nats.url, rig.directory / "secret") as messaging:
        return [
            decode_engine_status(
                await messaging.request(
                    names.describe_subject(NAMESPACE, decode_engine(value).engine_id),
                    b"",
                    timeout_s=5.0,
                )
            )
            for value in found.values()
        ]


async def at_rest(rig: Rig, free_blocks: int | None = None) -> int:
    """Returns the free blocks of all decode engines when nothing is under way, and as many are free
    as asked for. Raises AssertionError if that takes too long."""
    seen: list[EngineStatus] = []

    async def still() -> bool:
        try:
            seen[:] = await engines(rig)
        except DynamoLiteError:
            return False
        busy = any(engine.quarantined or engine.waiting for engine in seen)
        return not busy and free_blocks in (None, sum(engine.free_blocks for engine in seen))

    try:
        await eventually(still, _REST_S)
    except TimeoutError as exc:
        found = [(e.free_blocks, e.waiting, e.quarantined) for e in seen]
        raise AssertionError(f"not at rest with {free_blocks} free blocks: {found}") from exc
    return sum(engine.free_blocks for engine in seen)
