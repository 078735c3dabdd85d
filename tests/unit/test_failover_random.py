"""Random lives of a few requests and workers: every request ends once, with its tokens."""

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol.errors import DynamoLiteError, Refused
from dynamo_lite.request_plane.migration import Continue, MigrationPlan, Replay, Stay
from tests.builders import endpoint_record
from tests.unit.fake_workers import (
    ANSWER_TOKENS,
    FakeWorkers,
    Worker,
    answer_to,
    cluster,
    request_of,
)
from tests.unit.virtual import run

PLANS: list[MigrationPlan] = [Continue(reason="test"), Replay(reason="test"), Stay(reason="test")]
FULL = Refused("full", elsewhere=True, busy=True)


class Life:
    """Requests with ids 0, 1, …; `told` has every end that a caller got."""

    def __init__(self, fake: FakeWorkers, rng: random.Random):
        self.fake, self.rng = fake, rng
        self.callers: dict[str, asyncio.Task[None]] = {}
        self.told: list[tuple[str, str]] = []
        self.left: set[str] = set()

    def ask(self) -> None:
        request_id = str(len(self.callers))
        work = self._ask(request_id, self.rng.choice(PLANS), self.rng.choice([None, None, 6.25]))
        self.callers[request_id] = asyncio.create_task(work)

    async def _ask(self, request_id: str, plan: MigrationPlan, timeout_s: float | None) -> None:
        assert self.fake.client is not None
        request = request_of(request_id, timeout_s=timeout_s)
        try:
            await self.fake.client.submit(request, movable=plan)
        except DynamoLiteError as exc:
            self.told.append((request_id, type(exc).__name__))

    async def leave(self) -> None:
        """A caller hangs up: while asking it is cancelled, afterwards it aborts."""
        assert self.fake.client is not None
        if there := [i for i in self.callers if i not in self.left | self.ended()]:
            request_id = self.rng.choice(there)
            if self.rng.random() < 0.5:
                self.callers[request_id].cancel()
                await asyncio.wait({self.callers[request_id]})
            # Its last delta may have been quicker.
            if request_id not in self.ended():
                self.left.add(request_id)
                await self.fake.client.abort([request_id])

    def ended(self) -> set[str]:
        return {request_id for request_id, _ in self.fake.ends + self.told}

    async def event(self, what: str) -> None:
        match what:
            case "ask":
                self.ask()
            case "leave":
                await self.leave()
            case _:
                self.happens_to(self.rng.choice(list(self.fake.workers.values())), what)

    def happens_to(self, worker: Worker, what: str) -> None:
        match what:
            case "kill" if not worker.dead:
                self.fake.kill(worker.lease_id, listed=self.rng.random() < 0.3)
            case "start" if worker.dead:
                self.fake.start(worker.lease_id)
                self.fake.workers[worker.lease_id].tokens_per_step = self.rng.randint(1, 3)
            case "freeze":
                worker.frozen = True
            case "drop" if not worker.dead:
                self.fake.drop(endpoint_record(worker.lease_id), "silent")
            case "thaw":
                self.fake.thaw(worker.lease_id)
            case "slow":
                worker.accepts_after_s = self.rng.choice([0.0, 1.5])
            case "full":
                worker.refusal = self.rng.choice([FULL, None])

    async def mend(self) -> None:
        """Everything works again, and everybody who waits gets an end."""
        for lease_id, worker in self.fake.workers.items():
            if worker.dead:
                self.fake.start(lease_id)
            elif worker.frozen:
                self.fake.drop(endpoint_record(lease_id), "silent")
            worker.refusal = None
            self.fake.thaw(lease_id)
        self.fake.changed()
        await asyncio.sleep(300)


EVENTS = "ask ask ask kill kill start leave freeze drop thaw slow full".split()


async def life(seed: int, events: list[tuple[str, float]]) -> None:
    async with cluster(3) as (fake, client):
        lived = Life(fake, random.Random(seed))
        for what, pause_s in events:
            await lived.event(what)
            await asyncio.sleep(pause_s)
        await lived.mend()
        assert repr(client) == "<FailoverClient requests=0 attempts=0 tasks=0>"
        answered = sorted(i for i, how in fake.ends if how == "length")
        # Whoever leaves in the very step of the last delta may or may not have it.
        finished = sorted(i.partition("~")[0] for i in fake.finished)
        assert [i for i in finished if i not in lived.left] == [
            i for i in answered if i not in lived.left
        ]
        for request_id, caller in lived.callers.items():
            assert caller.done()
            ends = [how for i, how in fake.ends + lived.told if i == request_id]
            assert len(ends) == (request_id not in lived.left), (request_id, ends)
            tokens, right = fake.tokens(request_id), answer_to(request_of(request_id))
            assert tokens == right[: len(tokens)]
            assert len(tokens) == ANSWER_TOKENS or ends != ["length"]
            prompts = [d for d in fake.deltas.get(request_id, []) if d.prefill is not None]
            assert len(prompts) == bool(fake.deltas.get(request_id))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.sampled_from([0.0, 0.4, 1.0, 2.6])), max_size=40
    ),
)
def test_every_request_ends_once_with_the_right_tokens(seed: int, events: list[tuple[str, float]]):
    run(life(seed, [("ask", 0.0), *events]), seed=seed)
