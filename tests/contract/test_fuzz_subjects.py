"""Hostile messages on every subject, on the queue and among the notices, while requests run.

Two simulated engines of the shipped parts compute real answers out of real blocks:
a block that was freed too early, written twice or never given back shows.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import Decoder, encode
from dynamo_lite.protocol.decisions import decode_explain
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError
from dynamo_lite.protocol.health import Leave, decode_heartbeat, decode_leave
from dynamo_lite.protocol.prefill import (
    Claim,
    Done,
    Written,
    decode_claim,
    decode_done,
    decode_job,
    decode_written,
)
from tests.builders import prefill_job
from tests.hostile import Spoiler
from tests.sim.pair import GREEDY, QUEUE, Pair, play, tokens
from tests.simulation.engine.model import first_wrong
from tests.simulation.engine.mover import Wire
from tests.simulation.invariants import Judge
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.scenario import Scenario
from tests.twins.queue import MemoryQueue

FUZZ = settings(derandomize=True)


def _done(attempt: str, outcome: Any, claim: int) -> Done:
    return Done(attempt=attempt, claim=claim, outcome=outcome)


#: Messages as another graph might send them: well-formed, but about nothing here.
FOREIGN: tuple[tuple[str, Any], ...] = (
    ("claim", Claim(attempt="foreign", claim=3, writer_lease_id=2)),
    ("done", _done("foreign", "failed", 3)),
    ("leave", Leave(lease_id=2)),
    ("notice", Written(attempt="foreign", claim=3, rank=0, num_blocks=3, last=True)),
    (
        "job",
        prefill_job("foreign", prompt_token_ids=[1, 2, 3], num_computed_tokens=0, block_ids=[0, 1]),
    ),
)


DECODERS: dict[str, Decoder[Any]] = {
    "claim": decode_claim,
    "done": decode_done,
    "leave": decode_leave,
    "explain": decode_explain,
    "beat": decode_heartbeat,
    "job": decode_job,
    "notice": decode_written,
}


class Attack:
    """Sends what `rng` chooses to all that listens around `pair`, and counts what is no message."""

    def __init__(self, pair: Pair, rng: Random):
        self.pair, self.rng = pair, rng
        self.broken: Counter[str] = Counter()
        self.pool: list[bytes] = []
        self.seen: list[tuple[str, bytes]] = []
        self.spoiler = Spoiler(rng, self.pool)
        [metadata] = pair.decode.metadata
        engine = "t", metadata.engine_id
        self.subjects = {
            "claim": names.claim_subject(*engine),
            "done": names.done_subject(*engine),
            "leave": names.leave_subject(*engine),
            "describe": names.describe_subject(*engine),
            "explain": names.explain_subject(*engine),
            "beat": names.health_subject("t", "PrefillWorker"),
        }
        self.kinds = (self._replayed, self._spoiled, self._foreign)
        for where, message in FOREIGN:
            self._remember(where, encode(message))
        self._listen()

    def _remember(self, where: str, payload: bytes) -> None:
        if where == "describe":
            return
        self.pool.append(payload)
        self.seen.append((where, payload))

    def _listen(self) -> None:
        """True messages are remembered: to be sent again, and to be tampered with."""
        messaging = self.pair.servers.messaging()
        self.publish, self.request, self.push = (
            messaging.publish,
            messaging.request,
            MemoryQueue.push,
        )
        for method in ("publish", "request"):
            setattr(messaging, method, self._remembering(getattr(messaging, method)))
        mover: Any = self.pair.engines["decode"].mover
        take = mover.notices

        def notices() -> list[bytes]:
            taken = take()
            for payload in taken:
                if self._judge("notice", payload):
                    self._remember("notice", payload)
            return taken

        mover.notices = notices

        async def remember_and_push(queue: MemoryQueue, payload: bytes, **more: Any) -> int:
            self._remember("job", payload)
            return await self.push(queue, payload, **more)

        pair = self.pair
        pair.stack.enter_context(patch.object(MemoryQueue, "push", remember_and_push))

    def _remembering(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def remembered(subject: str, payload: bytes, **more: Any) -> Any:
            for where, known in self.subjects.items():
                if known == subject:
                    self._remember(where, payload)
            return await send(subject, payload, **more)

        return remembered

    async def run(self, messages: int) -> None:
        places = (*self.subjects, "job", "notice")
        for _ in range(messages):
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.02, 0.1)))
            where, payload = self.rng.choice(self.kinds)()
            if self.rng.random() < 0.2:
                where = self.rng.choice(places)
            await self._send(where, payload)

    def _replayed(self) -> tuple[str, bytes]:
        return self.rng.choice(self.seen)

    def _spoiled(self) -> tuple[str, bytes]:
        """Nowhere a message: who may send one may also change what it says."""
        where, payload = self.rng.choice(self.seen)
        spoiled = payload
        while any(self._judge(place, spoiled) for place in DECODERS):
            spoiled = self.spoiler.spoil(payload)
        return where, spoiled

    def _attempt(self) -> str:
        return self.rng.choice((*self.attempts[-3:], *self.attempts, "none"))

    def _foreign(self) -> tuple[str, bytes]:
        """A message about a real attempt, from a process that is not its writer."""
        attempt = self._attempt()
        where, word = self.rng.choice(
            (
                ("claim", Claim(attempt=attempt, claim=99, writer_lease_id=99)),
                # From a writer that is registered: the claim of its own differs.
                ("claim", Claim(attempt=attempt, claim=99, writer_lease_id=2)),
                ("done", _done(attempt, "written", 99)),
                ("done", _done(attempt, "abandoned", 99)),
                ("done", _done(attempt, "abandoned", 0)),
                ("notice", Written(attempt=attempt, claim=99, rank=0, num_blocks=1, last=True)),
                ("notice", Written(attempt=attempt, claim=0, rank=0, num_blocks=1)),
                ("leave", Leave(lease_id=2)),
            )
        )
        return where, encode(word)

    @property
    def attempts(self) -> list[str]:
        """Those that were ever asked for."""
        halves: Any = self.pair.engines["decode"].halves
        return list(halves.asked)

    async def _send(self, where: str, payload: bytes) -> None:
        if where == "beat" and self._is_its_beat(payload):
            return
        if not self._judge(where, payload):
            self.broken[where] += 1
        if where == "job":
            async with self.pair.servers.queue(QUEUE) as queue:
                await self.push(queue, payload, message_id=self.rng.randbytes(8).hex())
        elif where == "notice":
            self.pair.engines["decode"].mover.inbox.append(payload)
        elif self.rng.random() < 0.5:
            await self.publish(self.subjects[where], payload)
        else:
            with contextlib.suppress(DynamoLiteError):
                await self.request(self.subjects[where], payload, timeout_s=0.1)

    def _judge(self, where: str, payload: bytes) -> bool:
        """Whether it is a message that can be read there."""
        try:
            if where in DECODERS:
                DECODERS[where](payload)
        except ProtocolError:
            return False
        return True

    def _is_its_beat(self, payload: bytes) -> bool:
        """It may take the worker out of rotation: that is what beats are for."""
        return self._judge("beat", payload) and decode_heartbeat(payload).lease_id == 2


async def ask(pair: Pair, rng: Random) -> dict[str, list[int]]:
    """Sends requests of all lengths and cancels some of them. Returns the prompts of the
    others."""
    asked: dict[str, list[int]] = {}
    for number in range(12):
        name = f"r{number}"
        asked[name] = tokens(number, 12 + 9 * number)
        await pair.submit(name, asked[name], GREEDY)
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)))
        if rng.random() < 0.3:
            await pair.decode.abort([name])
            del asked[name]
    return asked


@settings(FUZZ, max_examples=40)
@given(rng=st.integers(0, (1 << 32) - 1).map(Random))
def test_hostile_messages_cost_no_block_and_no_token(rng: Random):
    async def script(pair: Pair) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        judge = Judge(loop, Scenario(seed=0, quiet_at_s=0.0))
        judge.engine_started(pair.engines["decode"])
        pair.fabric.on_landing = judge.landing
        attack = Attack(pair, rng)
        attacking = asyncio.create_task(attack.run(120))
        asked = await ask(pair, rng)
        await pair.until(lambda: asked.keys() <= pair.ended.keys())
        for name, prompt in asked.items():
            assert len(pair.got[name]) == GREEDY.max_tokens
            assert first_wrong(prompt, GREEDY, pair.got[name]) is None
        await attacking
        assert judge.violations == []
        await pair.until(lambda: not pair.jobs.working)
        await pair.until(lambda: not any(e.pool.taken() for e in pair.engines.values()))
        judge.check_caches()
        await pair.until(lambda: judge.unsettled() is None)
        assert judge.violations == []
        # Nor does anybody believe for long what was said of the queue.
        halves: Any = pair.engines["decode"].halves
        await pair.until(lambda: halves.scheduler._net.queue_watch.view.jobs == 0)
        await pair.submit("after", tokens(99, 50), GREEDY)
        await pair.until(lambda: "after" in pair.ended)
        assert first_wrong(tokens(99, 50), GREEDY, pair.got["after"]) is None
        # An engine's counts come up with its steps.
        assert not attack.broken - pair.drops

    play(script, Wire(slowest_s=0.3), num_blocks=200)
