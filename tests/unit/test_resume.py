"""A writer is lost half-way: what stays, and who does the rest."""

from collections.abc import Callable

import pytest

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.decision.rule import DecisionReason
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill, again
from dynamo_lite.disagg.messages import RankResults, WorkerReport
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.prefill import Part, RemotePrefillRequest, Written
from tests.builders import CLAIM, ManualClock
from tests.twins.mover import MemoryFabric
from tests.unit.decode_engine import BLOCK, HELD, TIMEOUT_S, WRITER, prompt
from tests.unit.decode_engine import Decode as Engine
from tests.unit.test_ranks import BLOCK_BYTES, Decode, Prefill, blocks, targets

# The policy


@pytest.mark.parametrize(
    ("outcome", "facts", "verdict"),
    [
        (Outcome.WRITER_SILENT, {}, "writer_lost"),
        (Outcome.WRITER_LOST, {}, "writer_lost"),
        (Outcome.WRITER_FAILED, {}, "writer_lost"),
        (Outcome.WRITER_FAILED, {"others": 0}, "no_other"),
        (Outcome.WRITER_ABANDONED, {}, "writer_lost"),
        (Outcome.WRITER_LOST, {"others": 0}, "no_other"),
        (Outcome.WRITER_LOST, {"tries": 2}, "tried"),
        (Outcome.WRITER_LOST, {"left_s": 4.9}, "late"),
        (Outcome.DEADLINE, {}, "not_the_writer"),
        (Outcome.CORRUPT, {}, "not_the_writer"),
        (Outcome.REFUSED, {}, "not_the_writer"),
    ],
)
def test_another_writer_is_asked_when_one_is_lost_in_time(outcome, facts, verdict):
    usual = {"tries": 1, "others": 1, "left_s": 25.0}
    known = {**usual, **facts}
    prefill = RemotePrefill(
        "r1",
        Decided(
            DecisionReason.LONG,
            0.0,
            DecisionInputs(prompt_tokens=9, cached_tokens=0),
            DisaggOptions(),
        ),
        tries=known["tries"],
        since=95.0,
        until=100.0 + known["left_s"],
        outcome=outcome,
    )
    assert again(prefill, others=known["others"], now=100.0) == verdict


# The rank

ORDER = (2, 5, 6, 9)


class Ranks:
    """An attempt of four blocks; block i of the writer goes to ORDER[i]. known: whether the decode
    rank has been told of it."""

    def __init__(self, *, known: bool = True):
        fabric = MemoryFabric()
        self.decode = Decode(fabric, "e1", checks=True)
        self.prefill = Prefill(fabric)
        if known:
            self.decode.settle(expect={"a1": "r1"}, blocks={"a1": ORDER})

    def write(self, *positions: int, last: bool = False) -> None:
        write = blocks(
            list(positions), [ORDER[i] for i in positions], last=last, first=positions[0]
        )
        self.prefill.step(write, targets=targets(self.decode))

    def give_up(self) -> dict[str, int]:
        """What the rank reports as landed."""
        assert self.decode.settle(give_up=[("a1", "r1")]) == (set(), {"r1"})
        report = self.decode.rank.report()
        assert report is not None and self.decode.rank.report() is None
        return report.landed


@pytest.mark.parametrize(
    ("writes", "landed"),
    [
        ([], 0),
        ([(0,)], 1),
        ([(0, 1)], 2),
        ([(0,), (1, 2)], 3),
        ([(1, 2), (0,)], 3),  # no order holds between writes
        ([(0,), (2,)], 1),
        ([(1,), (2,)], 0),
        ([(0, 1), (0,), (1,)], 2),  # preempted, and written again
    ],
)
def test_what_has_landed_without_a_gap_stays(writes, landed):
    ranks = Ranks()
    for write in writes:
        ranks.write(*write)
    assert ranks.give_up() == {"r1": landed}


@pytest.mark.parametrize(
    "odd",
    [
        {"num_blocks": 0},
        {"num_blocks": 5},
        {"writers": 2},  # the other has brought nothing
        {"parts": []},
        {"parts": [Part(0, 1, 0, BLOCK_BYTES - 1)]},
        {"parts": [Part(0, 2, 0, BLOCK_BYTES)]},
        {"parts": [Part(1, 1, 0, BLOCK_BYTES)]},
        {"first": 1},
    ],
)
def test_odd_notices_bring_nothing(odd):
    ranks = Ranks()
    usual = {"first": 0, "num_blocks": 2, "parts": [Part(0, 1, 0, BLOCK_BYTES)]}
    notice = Written(attempt="a1", claim=CLAIM, rank=0, **{**usual, **odd})
    ranks.decode.mover.inbox.append(encode(notice))
    ranks.decode.settle()
    assert ranks.give_up() == {"r1": 0}


# The scheduler half

OTHER = WRITER + 1


class Caching(Engine):
    """cached: request -> tokens whose blocks the prefix cache was given."""

    def __init__(self, clock: ManualClock):
        super().__init__(clock, cache=self._take)
        self.cached: dict[str, int] = {}
        self.writers.members = (WRITER, OTHER)

    def _take(self, request, tokens: int) -> None:
        assert request.request_id in self.taken, "its blocks are gone"
        self.cached[request.request_id] = tokens

    async def falls_silent(self, writer: int) -> None:
        self.writers.ails[writer] = "no beats"
        self.attempts.workers_changed(frozenset(), frozenset({writer}))

    async def lose(self, end: Callable[[], None] | None = None, landed: int = 3) -> None:
        """The writer of r1 falls silent (or what `end` says); its blocks are taken back."""
        await self.falls_silent(WRITER)
        assert self.half.build_step().give_up
        report = WorkerReport(landed={"r1": landed})
        self.half.worker_output(RankResults(lost={"r1"}), report)
        self.pool.free_blocks(self.taken.pop("r1"))

    async def again(self, tokens: int) -> RemotePrefillRequest | None:
        """The engine looks at r1 again, with the prefix that it finds in its cache."""
        if not self.admit(prompt("r1", tokens), self.cached.get("r1", 0)):
            return None
        return await self.job_of_step()


@pytest.fixture
async def engine():
    engine = Caching(ManualClock())
    async with engine.queue:
        yield engine
        await engine.network()


async def begin(engine: Caching, tokens: int = 41) -> str:
    attempt = await engine.ask("r1", tokens, claimed=True)
    assert (await engine.job()).attempt == attempt
    return attempt


async def test_the_rest_of_a_lost_prefill_is_asked_of_another_writer(engine: Caching):
    first = await begin(engine)
    engine.clock.now += 5
    engine.sees()
    await engine.lose(landed=6)
    assert engine.cached == {"r1": 6 * BLOCK}
    job = await engine.again(41)
    assert job is not None and job.attempt != first
    assert job.num_computed_tokens == 6 * BLOCK
    assert (len(job.prefix_block_ids), len(job.block_ids)) == (6, 4)
    assert job.deadline == engine.clock.wall() + TIMEOUT_S - 5
    held = {block.block_id for block in engine.half.prefills._by_attempt[first].held}
    assert not held & set(job.block_ids), "its zombie may still write there"
    assert engine.counted("resume/writer_lost") == 1
    assert await engine.claim(job.attempt, OTHER) == HELD
    await engine.step()
    engine.output("r1")
    await engine.done(job.attempt)
    engine.finish("r1")
    await engine.done(first, "abandoned")
    await engine.step()
    engine.assert_clean()


async def test_no_prompt_asks_more_often_than_allowed(engine: Caching):
    engine.writers.members = (WRITER, OTHER, OTHER + 1)
    await begin(engine)
    await engine.lose(landed=2)
    job = await engine.again(41)
    assert job is not None
    await engine.claim(job.attempt, OTHER)
    await engine.falls_silent(OTHER)
    engine.half.build_step()
    report = WorkerReport(landed={"r1": 2})
    engine.half.worker_output(RankResults(lost={"r1"}), report)
    engine.pool.free_blocks(engine.taken.pop("r1"))
    assert engine.cached == {"r1": 4 * BLOCK}, "two more than the first had brought"
    assert await engine.again(41) is None
    assert engine.counted("resume/tried") == 1
    assert engine.half.cached_tokens("r1") == 0, "prefill workers have computed what is cached"
