"""Models with several KV groups: each group has its own table of blocks, in the same memory."""

import pytest
from msgspec import structs

from dynamo_lite.disagg.prefill.peer_links import PeerLink
from dynamo_lite.protocol.errors import IncompatiblePeer
from dynamo_lite.protocol.prefill import NULL_BLOCK
from dynamo_lite.protocol.records import KvRegion, RankMetadata
from dynamo_lite.transfer.sharding import join
from tests.builders import prefill_job
from tests.twins.mover import MemoryFabric
from tests.unit.decode_engine import HELD, Decode, prompt
from tests.unit.prefill_rig import ScriptedLinks, working
from tests.unit.test_prefix_reads import Half
from tests.unit.test_ranks import BLOCK_BYTES, Prefill, blocks, targets
from tests.unit.test_ranks import Decode as DecodeEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


# The decode side


async def test_a_job_names_the_blocks_of_each_group(decode: Decode):
    """16 tokens are wanted, of which 4 are cached; the second group has a window of 8."""
    null = decode.pool.blocks[NULL_BLOCK]
    null.is_null = True
    full, window = decode.pool.blocks[1:6], [null, null, *decode.pool.blocks[6:9]]
    request = prompt("r1", 17)
    assert decode.half.num_new_matched_tokens(request, 4) == (12, True)
    for block in {id(block): block for block in [*full, *window]}.values():
        block.ref_cnt += 1
    tables = [[block.block_id for block in table] for table in (full, window)]
    decode.half.state_after_alloc(request, tables, 12)
    job = await decode.job_of_step()
    assert (job.num_computed_tokens, job.block_ids) == (4, [2, 3, 4])
    assert job.other_groups == [[NULL_BLOCK, 6, 7]]
    assert job.prefix_block_ids == [], "a window's prefix is not whole"
    assert await decode.claim(job.attempt) == HELD
    held = {block.block_id for block in decode.half.prefills._by_attempt[job.attempt].held}
    assert held >= {2, 3, 4, 6, 7} and not held & {5, 8}


# The prefill side


@pytest.fixture
def half() -> Half:
    return Half()


def test_a_write_has_what_the_decode_engine_needs_of_each_group(half: Half):
    """26 tokens in blocks of 4, from a window of two blocks; computed in two steps."""
    job = half.job(prefix=0)
    window = [NULL_BLOCK] * 5 + [80, 81]
    job.kv_transfer_params["other_groups"] = [window]
    half.admit(job)
    half.half._blocks_of = lambda _name, _tokens: [range(1, 8), [0, 0, 0, 14, 15, 16, 17]]
    [first] = half.step(a1=16).writes
    assert (first.local_ids, first.remote_ids) == ([1, 2, 3, 4], [60, 61, 62, 63])
    assert first.other_groups == [([], [])] and not first.last
    job.num_computed_tokens = 16
    [rest] = half.step(a1=10).writes
    assert (rest.local_ids, rest.remote_ids) == ([5, 6, 7], [64, 65, 66])
    assert rest.other_groups == [([16, 17], [80, 81])]
    assert (rest.last, rest.first, rest.of.num_blocks) == (True, 4, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"other_groups": []},
        {"other_groups": [[5, 6], [7, 8]]},
        {"other_groups": [[5]]},
        {"other_groups": [[5, 1 << 20]]},
        {"other_groups": [[5, NULL_BLOCK]]},
        {"other_groups": [[5, 6]], "prefix_block_ids": [3]},
    ],
)
async def test_groups_that_do_not_fit_are_never_claimed(wrong):
    links = ScriptedLinks()
    ranks = (of_rank(region(0), region(1, "1")),)
    links.link = PeerLink(structs.replace(links.link.target, ranks=ranks))
    async with working(links=links) as rig:
        await rig.push(prefill_job(**wrong))
        await rig.acked()
        assert (rig.told, rig.claims) == ([("a1", "failed")], [])
        assert rig.counted("malformed") == 1


# The memory


def region(group: int, layer: str = "0", base: int = 0, **more) -> KvRegion:
    made = {"stride_bytes": BLOCK_BYTES, "block_bytes": BLOCK_BYTES, **more}
    return KvRegion(layer=layer, base=base, group=group, **made)


def of_rank(*regions: KvRegion, agent: bytes = b"") -> RankMetadata:
    return RankMetadata(agent=agent, memory="DRAM", device=0, regions=regions)


def test_groups_that_differ_are_refused():
    here, there = [of_rank(region(0), region(1, "1"))], [of_rank(region(0), region(2, "1"))]
    with pytest.raises(IncompatiblePeer, match="layer 1 is in KV group 1 here, 2 there"):
        join("d1", here, there)


def test_window_heads_of_two_ranks_are_joined():
    head = {"head_bytes": BLOCK_BYTES // 2}
    two = [
        of_rank(
            *(region(g, f"{g}", block_bytes=BLOCK_BYTES // 2, first_head=n, **head) for g in (0, 1))
        )
        for n in range(2)
    ]
    one = [of_rank(*(region(g, f"{g}", **head) for g in (0, 1)))]
    lanes = join("d1", two, one)
    assert {rank: [lane.remote.group for lane in mine] for (rank, _), mine in lanes.items()} == {
        0: [0, 1],
        1: [0, 1],
    }


def test_blocks_that_would_have_to_be_converted_are_refused():
    state = {"block_bytes": BLOCK_BYTES // 2, "head_bytes": BLOCK_BYTES // 2}
    two = [of_rank(region(0), region(1, "1", first_head=rank, **state)) for rank in range(2)]
    one = [of_rank(region(0), region(1, "1", head_bytes=BLOCK_BYTES))]
    with pytest.raises(IncompatiblePeer):
        join("d1", two, one)


def grouped(memory, layers=("0", "1")) -> None:
    """The memory's layer, and another one of a second group at the same address."""
    first = memory.rank.regions[0]
    memory.rank = of_rank(
        *(region(group, layer, first.base) for group, layer in enumerate(layers)),
        agent=memory.rank.agent,
    )


@pytest.fixture
def engines() -> tuple[Prefill, DecodeEngine]:
    fabric = MemoryFabric()
    prefill, decode = Prefill(fabric), DecodeEngine(fabric, "e1")
    for memory in (prefill.memory, decode.memory):
        grouped(memory)
    prefill.rank._peers._own = prefill.memory.rank
    return prefill, decode


def test_each_group_s_blocks_are_written(engines):
    prefill, decode = engines
    write = blocks([1, 2], [3, 4], last=True, num_blocks=2)
    write.other_groups = [([7], [9])]
    prefill.step(write, targets=targets(decode))
    assert decode.memory.written() == {3: 101, 4: 102, 9: 107}


def test_a_block_that_its_engine_gave_back_fails_the_attempt(engines):
    prefill, decode = engines
    write = blocks([1, 2], [3, 4], last=True, num_blocks=2)
    write.other_groups = [([NULL_BLOCK], [9])]
    prefill.step(write, targets=targets(decode), ended=[("a1", True)])
    _, failures = prefill.ended()
    assert "given back before it was written" in failures["a1"]
    assert decode.memory.written() == {}


def test_a_rank_without_layers_that_need_the_blocks_writes_nothing(engines):
    """A pipeline stage whose layers all have a window."""
    prefill, decode = engines
    for memory in (prefill.memory, decode.memory):
        memory.rank = of_rank(memory.rank.regions[1], agent=memory.rank.agent)
    prefill.rank._peers._own = prefill.memory.rank
    write = blocks([1, 2], [3, 4])
    write.other_groups = [([], [])]
    prefill.step(write, targets=targets(decode), ended=[("a1", True)])
    assert prefill.mover.transfers == [] and prefill.ended() == ({"a1"}, {})
