"""Invalid records in the store, how a writer handles them, and the status server."""

import asyncio
import contextlib
from collections import Counter
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.disagg.messages import PrefillStep
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.records import (
    EngineMetadata,
    KvRegion,
    RankMetadata,
    decode_engine,
    encode_engine,
)
from dynamo_lite.runtime.members.roster import Roster
from tests.builders import always_held, block_write, endpoint_record, engine_metadata, key_of
from tests.hostile import Spoiler
from tests.twins.mover import MemoryFabric, MemoryMover
from tests.twins.servers import MemoryStore

FUZZ = settings(deadline=None, derandomize=True, max_examples=100)
RNG = st.integers(0, (1 << 32) - 1).map(Random)
PREFIX = names.endpoint_prefix("t", "VllmWorker", "generate")
BLOCKS, BLOCK_BYTES = 16, 64


@FUZZ
@given(rng=RNG)
def test_hostile_records_neither_become_members_nor_hide_them(rng: Random):
    spoiler = Spoiler(rng)
    true = endpoint_record(7)
    true_key = key_of(true)

    async def main() -> None:
        drops: Counter[str] = Counter()
        store = MemoryStore()
        await store.put(true_key, encode_json(true))
        async with Roster(store, PREFIX, lambda where: drops.update([where])) as roster:
            for _ in range(10):
                foreign = endpoint_record(rng.randint(8, 10))
                key = key_of(foreign)
                key = rng.choice((key, PREFIX, f"{PREFIX}zz", f"{key}0"))
                await store.put(key, spoiler.spoil(encode_json(foreign)))
            last = endpoint_record(11)
            key = key_of(last)
            await store.put(key, encode_json(last))
            members = await roster.wait(lambda found: any(m.lease_id == 11 for m in found), 5)
            assert true in members
            for member in members:
                assert key_of(endpoint_record(member.lease_id)).startswith(PREFIX)
                assert member.transport.nats_tcp.isascii() and " " not in member.transport.nats_tcp
            kept = {key_of(endpoint_record(m.lease_id)) for m in members}
            stored = await store.get_prefix(PREFIX)
            assert drops["record"] >= len(stored.keys() - kept)

    asyncio.run(main())


def engine_of(mover: MemoryMover, pool: np.ndarray, layer: str = "0") -> EngineMetadata:
    base = pool.__array_interface__["data"][0]
    region = KvRegion(
        layer=layer, plane=0, base=base, stride_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES
    )
    rank = RankMetadata(agent=mover.metadata(), memory="DRAM", device=0, regions=(region,))
    return engine_metadata(lease_id=7, fingerprint={"model": "m"}, num_blocks=BLOCKS, ranks=(rank,))


class Engines:
    """A decode engine's pool, all zeros, between two guards of ones; and a writer's."""

    def __init__(self) -> None:
        fabric = MemoryFabric()
        self.memory = np.ones((3, BLOCKS, BLOCK_BYTES), np.uint8)
        self.pool = self.memory[1]
        self.pool[:] = 0
        target = MemoryMover(fabric, "decode")
        target.register([(self.pool.__array_interface__["data"][0], self.pool.nbytes)], "DRAM", 0)
        self.metadata = engine_of(target, self.pool)
        self.source = np.full((BLOCKS, BLOCK_BYTES), 9, np.uint8)
        mover = MemoryMover(fabric, "prefill")
        mover.register(
            [(self.source.__array_interface__["data"][0], self.source.nbytes)], "DRAM", 0
        )
        own = engine_of(mover, self.source).ranks[0]
        self.rank = PrefillRank(mover, own, 0, always_held)

    def write(self, target: EngineMetadata) -> bool:
        """Lets the writer write blocks 3 and 4. Returns whether the writer reports them as
        written."""
        engine_id = target.engine_id
        write = block_write("a", [0, 1], [3, 4], target_engine=engine_id, last=True, num_blocks=2)
        ended = [("p-a", True)]
        step = PrefillStep(writes=[write], targets={engine_id: encode(target)}, ended=ended)
        self.rank.step(step, lambda: True)
        assert self.rank.results().sent == {"p-a"}
        return self.rank.report() is None

    def check_guards(self) -> None:
        assert (self.memory[0] == 1).all() and (self.memory[2] == 1).all()


def impossible(rng: Random, true: EngineMetadata) -> EngineMetadata | None:
    """Metadata of the right types that may be wrong in anything; None where that is unlikely."""
    spoiler = Spoiler(rng)
    for _ in range(20):
        with contextlib.suppress(ProtocolError):
            changed = spoiler.spoil(encode_json(true))
            return decode_engine(encode_engine(decode_json(changed, EngineMetadata)))
    return None


@FUZZ
@given(rng=RNG)
def test_impossible_metadata_fails_the_attempt_and_touches_nothing_else(rng: Random):
    engines = Engines()
    target = impossible(rng, engines.metadata)
    if target is not None:
        engines.write(target)
    engines.check_guards()
    fresh = Engines()
    assert fresh.write(fresh.metadata)
    assert (fresh.pool[3:5] == 9).all() and fresh.pool.sum() == 2 * 9 * BLOCK_BYTES
