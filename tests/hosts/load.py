"""What is asked of the graph on the hosts, and what came of it."""

import asyncio
import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.errors import BrokerUnavailable, QueueFull
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually
from tests.chaos.client import Answer
from tests.chaos.load import Load
from tests.chaos.questions import Known, Question
from tests.hosts.program import Program
from tests.hosts.rig import API_KEY, HTTP_PORT
from tests.process.null_graph import told
from tests.vllm.asking import prompt_ids

_PAUSE_S = 0.05
#: Longer than a pull request waits, and than the queue takes to choose a leader.
_COMES_S = 20.0
#: Of each Frontend: so engines have prompts and answers in one step.
_CLIENTS = 3
#: Each has one pull request that waits for a job.
PULLERS = 2


def question(seed: int, prompt_tokens: int, tokens: int) -> Question:
    body = {
        **{"model": "tiny", "prompt": prompt_ids(prompt_tokens, seed=seed), "max_tokens": tokens},
        **{"temperature": 0, "ignore_eos": True, "return_token_ids": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    return Question(f"hosts-{seed}", body)


def told_questions(lengths: Sequence[int] = (30, 60, 60, 120, 120, 300)) -> Known:
    """As the null engines answer them. lengths: of the answers; short ones, and some of 6 s."""
    asked = [question(number, 20, tokens) for number, tokens in enumerate(lengths)]
    right: dict[str, Answer] = {}
    for one, tokens in zip(asked, lengths, strict=True):
        wanted = [told(one.body["prompt"], position) for position in range(tokens)]
        right[one.name] = Answer(tokens={0: wanted}, finish={0: "length"}, usage=tokens)
    return asked, right


class Clients:
    """Async context manager: those who ask one Frontend over HTTP."""

    def __init__(self, frontend: Program, known: Known):
        self.frontend = frontend
        self._known = known
        self._loads: list[Load] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.arrive()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def right(self) -> int:
        """How many answers there were; all of these are right."""
        return sum(load.tally.right for load in self._loads)

    async def arrive(self) -> None:
        load = Load(
            HTTP_PORT,
            *self._known,
            seed=len(self._loads),
            clients=_CLIENTS,
            pause_s=_PAUSE_S,
            cancels=0.0,
            host=self.frontend.host.address,
            api_key=API_KEY,
        )
        self._loads.append(await self._stack.enter_async_context(load))

    def turn_to(self, frontend: Program) -> None:
        """They ask it from their next request on; the answers under way still come."""
        self._loads[-1].turn_to(frontend.host.address)

    def stop(self) -> None:
        """None of them asks again."""
        for load in self._loads:
            load.stop()

    async def leave(self) -> None:
        """At once, in the middle of their answers."""
        await self._loads[-1].abandon()

    def trouble(self) -> list[str]:
        """What was wrong, lost or refused."""
        return [
            f"{self.frontend.name}: {tally.wrong} wrong, lost {dict(tally.lost)},"
            f" refused {dict(tally.refused)}: {tally.examples}"
            for tally in (load.tally for load in self._loads)
            if tally.wrong or tally.lost or tally.refused
        ]


class Jobs:
    """Async context manager: users push into the prefill queue's stream, others pull from it. As
    decode workers do, those who push take back the jobs that never come."""

    def __init__(self, nats_url: str):
        self._url = nats_url
        self._stack = AsyncExitStack()
        #: With their sequences.
        self.pushed: dict[bytes, int] = {}
        self.done: Counter[bytes] = Counter()
        self.refused = 0
        self._stop = asyncio.Event()
        #: Of all that are pushed. The broker remembers the ids of earlier jobs.
        self.prefix = secrets.token_hex(8)
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        config = QueueConfig(replicas=3)
        async with AsyncExitStack() as stack:
            users = [
                await stack.enter_async_context(JetStreamQueue(self._url, "jobs", config))
                for _ in range(2 + PULLERS)
            ]
            for queue in users[2:]:
                await stack.enter_async_context(running(self._pull(queue), name="pull"))
            self._pushing = [
                await stack.enter_async_context(running(self._push(queue), name="push"))
                for queue in users[:2]
            ]
            self._queue = users[0]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def __repr__(self) -> str:
        pushed, done, refused = len(self.pushed), len(self.done), self.refused
        return f"Jobs({pushed} pushed, {done} done, {refused} refused)"

    async def end(self) -> tuple[int, int]:
        """Stops pushing. How many jobs never came: those that could be taken back, and those that
        the queue does not have any more. Raises DynamoLiteError."""
        self._stop.set()
        await asyncio.gather(*self._pushing)
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: self.pushed.keys() <= self.done.keys(), _COMES_S)
        there = [
            await self._queue.delete(sequence)
            for job, sequence in self.pushed.items()
            if job not in self.done
        ]
        return there.count(True), there.count(False)

    async def _push(self, queue: JetStreamQueue) -> None:
        while not self._stop.is_set():
            payload = f"{self.prefix}-{next(self._numbers)}".encode()
            try:
                self.pushed[payload] = await queue.push(payload, message_id=payload.decode())
            except (BrokerUnavailable, QueueFull):
                self.refused += 1
            await asyncio.sleep(_PAUSE_S)

    async def _pull(self, queue: JetStreamQueue) -> None:
        while True:
            job = await queue.pull(timeout_s=2.0)
            if job is not None:
                self.done[job.payload] += 1
                with contextlib.suppress(BrokerUnavailable):
                    await job.ack()
