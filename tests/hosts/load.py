"""What is asked of the graph on the hosts, and what came of it."""

import asyncio
import itertools
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, PushAmbiguous, QueueFull
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually

_PAUSE_S = 0.05


class Results:
    """What the Callers have written, of which the last line may not be complete yet."""

    def __init__(self, files: list[Path]):
        self._files = files
        self._before = {file: len(list(_lines(file))) for file in files}

    def counts(self) -> dict[str, int]:
        """How many requests of each Caller have ended."""
        return {file.stem: len(list(_lines(file))) for file in self._files}

    def ended(self) -> int:
        """How many requests have ended since this was made."""
        return sum(self.counts().values()) - sum(self._before.values())

    def wrong(self) -> list[str]:
        """Those that were refused, lost, or answered with other tokens since this was made."""
        ends = (end for file in self._files for end in list(_lines(file))[self._before[file] :])
        return [str(end) for end in ends if end["end"] != "length" or not end["exact"]]

    async def more(self, number: int, within_s: float) -> None:
        """Returns after so many more of each Caller."""
        before = self.counts()

        def enough() -> bool:
            return all(now >= before[name] + number for name, now in self.counts().items())

        try:
            await eventually(enough, within_s)
        except TimeoutError as exc:
            raise AssertionError(f"no {number} more: {before}, now {self.counts()}") from exc


def _lines(file: Path) -> Iterator[dict[str, object]]:
    text = file.read_text() if file.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield json.loads(line)


class Jobs:
    """Async context manager: two users push into the prefill queue's stream, two pull from it."""

    def __init__(self, nats_url: str):
        self._url = nats_url
        self._stack = AsyncExitStack()
        self.pushed: list[bytes] = []
        self.done: Counter[bytes] = Counter()
        self.refused = 0
        self._stop = asyncio.Event()
        # The broker remembers the ids of earlier jobs.
        self._run, self._numbers = secrets.token_hex(4), itertools.count()

    async def __aenter__(self) -> Self:
        config = QueueConfig(replicas=3, ack_wait_s=5.0)
        stream, subject = names.prefill_stream("jobs"), names.prefill_jobs_subject("jobs")
        async with AsyncExitStack() as stack:
            users = [
                await stack.enter_async_context(
                    JetStreamQueue(self._url, stream=stream, subject=subject, config=config)
                )
                for _ in range(4)
            ]
            for queue in users[2:]:
                await stack.enter_async_context(running(self._pull(queue), name="pull"))
            self._pushing = [
                await stack.enter_async_context(running(self._push(queue), name="push"))
                for queue in users[:2]
            ]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def __repr__(self) -> str:
        pushed, done, refused = len(self.pushed), len(self.done), self.refused
        return f"Jobs({pushed} pushed, {done} done, {refused} refused)"

    async def missing(self, within_s: float) -> set[bytes]:
        """Stops pushing. The jobs that were pushed and never came."""
        self._stop.set()
        await asyncio.gather(*self._pushing)
        try:
            await eventually(lambda: set(self.pushed) <= set(self.done), within_s)
        except TimeoutError:
            return set(self.pushed) - set(self.done)
        return set()

    async def _push(self, queue: JetStreamQueue) -> None:
        while not self._stop.is_set():
            payload = f"{self._run}-{next(self._numbers)}".encode()
            try:
                await queue.push(payload, message_id=payload.decode())
                self.pushed.append(payload)
            except (BrokerUnavailable, PushAmbiguous, QueueFull):
                self.refused += 1
            await asyncio.sleep(_PAUSE_S)

    async def _pull(self, queue: JetStreamQueue) -> None:
        while True:
            job = await queue.pull(timeout_s=2.0)
            if job is not None:
                self.done[job.payload] += 1
                try:
                    await job.ack()
                except BrokerUnavailable:
                    continue  # it comes again
