"""Invalid records in the store, and how a writer handles them."""

import asyncio
import contextlib
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.members.roster import Roster
from tests.builders import endpoint_record, key_of, members_when
from tests.hostile import Spoiler
from tests.twins.mover import MemoryFabric
from tests.twins.servers import MemoryStore
from tests.unit.test_ranks import Decode, Prefill, blocks

FUZZ = settings(derandomize=True, max_examples=100)
RNG = st.integers(0, (1 << 32) - 1).map(Random)
PREFIX = names.endpoint_prefix("t", "VllmWorker", "generate")


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
            members = await members_when(
                roster, lambda found: any(m.lease_id == 11 for m in found), 5
            )
            assert true in members
            for member in members:
                assert member.transport.nats_tcp.isascii() and " " not in member.transport.nats_tcp
            kept = {key_of(endpoint_record(m.lease_id)) for m in members}
            stored = await store.get_prefix(PREFIX)
            assert kept <= stored.keys()
            assert drops["record"] + drops["version"] >= len(stored.keys() - kept)

    asyncio.run(main())


def impossible(rng: Random, true: EngineMetadata) -> EngineMetadata | None:
    """Metadata of the right types that may be wrong in anything; None where that is unlikely."""
    spoiler = Spoiler(rng)
    for _ in range(20):
        with contextlib.suppress(ProtocolError):
            return decode_engine(spoiler.spoil(encode_json(true)))
    return None


@FUZZ
@given(rng=RNG)
def test_impossible_metadata_fails_the_attempt_and_touches_nothing_else(rng: Random):
    fabric = MemoryFabric()
    prefill, decode = Prefill(fabric), Decode(fabric, "e1")
    own = prefill.memory.written()

    def write(attempt: str, target: EngineMetadata) -> dict[str, str]:
        """Blocks 3 and 4. Returns the failures."""
        engine = target.engine_id
        asked = blocks([1, 2], [3, 4], attempt=attempt, engine=engine, last=True, num_blocks=2)
        ended = [(attempt, True)]
        prefill.step(asked, targets={engine: encode(target)}, ended=ended)
        sent, failures = prefill.ended()
        assert sent == {attempt}
        return failures

    target = impossible(rng, decode_engine(encode_json(decode.known())))
    if target is not None:
        write("a1", target)
    assert prefill.memory.written() == own
    other = Decode(fabric, "e2")
    assert write("a2", other.known()) == {}
    assert other.memory.written() == {3: 101, 4: 102}
