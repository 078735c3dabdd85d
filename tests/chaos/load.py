"""Clients that never stop asking, and the count of how they fared.

The load is closed: each client waits for its answer before it asks again, so
that the load fits whatever the machine bears. What was refused before it began
is asked again; whatever else goes wrong is a lost request.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.client import PATIENCE_S, Answer, Failed, Refused, ask
from tests.chaos.questions import Question

_MAX_EXAMPLES = 20
#: For this long the members of a family share a salt, and thereby prefix caches.
_FAMILY_EPOCH_S = 20.0
_END_S = PATIENCE_S + 10
_NEWS_S = 5.0

#: Says why an attempt could not but break, or "". Takes since when it ran (`time.monotonic()`).
Excuse = Callable[[float], str]


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Ends earlier if `stop` is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


@dataclass
class Wait:
    """A longest wait, and the request that waited."""

    seconds: float = 0.0
    whose: str = ""

    def see(self, seconds: float, whose: str) -> None:
        if seconds > self.seconds:
            self.seconds, self.whose = round(seconds, 3), whose


@dataclass
class Tally:
    """Requests end in one way: right, wrong, cancelled (by the client) or lost.

    refused: attempts that were not begun, by kind; they were made again. excused:
    attempts that could not be answered (their Frontend or the only engine
    was killed); they were made again, too. waits are of whole answers' parts:
    until the first token, and between two pieces of a stream.
    """

    requests: int = 0
    right: int = 0
    cancelled: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    excused: Counter[str] = field(default_factory=Counter[str])
    lost: Counter[str] = field(default_factory=Counter[str])
    wrong: int = 0
    examples: list[str] = field(default_factory=list[str])
    first_token: Wait = field(default_factory=Wait)
    between_tokens: Wait = field(default_factory=Wait)
    tokens: int = 0

    @property
    def open(self) -> int:
        return self.requests - self.right - self.cancelled - self.wrong - self.lost.total()

    def example(self, text: str) -> None:
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(text)


async def telling(
    tally: Tally, say: Callable[[str], None], more: Callable[[], str] = lambda: ""
) -> None:
    """Says every few seconds how it goes, until it is cancelled."""
    while True:
        await asyncio.sleep(_NEWS_S)
        say(
            f"asked {tally.requests}, right {tally.right}, cancelled {tally.cancelled}, refused"
            f" {tally.refused.total()}, excused {tally.excused.total()}, lost"
            f" {tally.lost.total()}, wrong {tally.wrong}{more()}"
        )


class Load:
    """`clients` at a time. Use as an async context manager; leaving it lets the
    requests under way end.

    cancels: share of the requests whose client leaves at a random moment.
    """

    def __init__(
        self,
        port: int,
        asked: list[Question],
        right: dict[str, Answer],
        *,
        seed: int = 0,
        clients: int = 8,
        pause_s: float = 0.25,
        cancels: float = 0.15,
        excuse: Excuse = lambda began: "",
        host: str = "127.0.0.1",
        api_key: str = "",
    ):
        self.tally = Tally()
        self._host, self._port, self._api_key = host, port, api_key
        self._asked = asked
        self._right = right
        self._rng = random.Random(seed)
        self._clients = clients
        self._pause_s = pause_s
        self._cancels = cancels
        self._excuse = excuse
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        self._tasks = [
            asyncio.create_task(self._client(number), name=f"client-{number}")
            for number in range(self._clients)
        ]
        return self

    def stop(self) -> None:
        """No client asks again. The requests under way go on."""
        self._stopping.set()

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)
        await self.abandon()

    def turn_to(self, host: str) -> None:
        """From the next request on, the clients ask this host."""
        self._host = host

    async def abandon(self) -> None:
        """All clients leave at once. Their requests under way do not end."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end

    async def _client(self, number: int) -> None:
        while not self._stopping.is_set():
            question = self._rng.choice(self._asked)
            leaves_s = None
            if self._rng.random() < self._cancels:
                leaves_s = self._rng.choice((0.03, 0.2, 1.0)) * self._rng.random()
            await self.one(question, leaves_s)
            pause_s = self._rng.expovariate(1 / self._pause_s) if self._pause_s else 0.0
            await pause(self._stopping, pause_s)

    async def one(self, question: Question, leaves_s: float | None = None) -> Answer | None:
        """One request to its end; returns the answer, right or wrong, if there is one.

        leaves_s: the client disconnects after this time.
        """
        tally = self.tally
        tally.requests += 1
        body = question.salted(self._salt(question))
        first = time.monotonic()
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(leaves_s):
                    answer = await ask(self._port, body, self._host, self._api_key)
            except Refused as exc:
                tally.refused[exc.kind] += 1
                if time.monotonic() - first > PATIENCE_S:
                    self._lose(question, began, "refused for too long", exc)
                    return None
                await asyncio.sleep(exc.retry_after_s)
            except TimeoutError as exc:
                if leaves_s is None or time.monotonic() - began > PATIENCE_S:
                    self._lose(question, began, "no answer", exc)
                else:
                    tally.cancelled += 1
                return None
            except Failed as exc:
                if why := self._excuse(began):
                    tally.excused[why] += 1
                    continue
                self._lose(question, began, exc.kind, exc)
                return None
            else:
                self._judge(question, answer)
                return answer

    def _judge(self, question: Question, answer: Answer) -> None:
        tally = self.tally
        at = f"{question.name} at {self._clock()}"
        tally.tokens += sum(len(tokens) for tokens in answer.tokens.values())
        if question.body["stream"]:
            tally.first_token.see(answer.first_s, at)
            tally.between_tokens.see(answer.gap_s, at)
        if answer.same(self._right[question.name]):
            tally.right += 1
        else:
            tally.wrong += 1
            tally.example(f"wrong: {at}: {_difference(answer, self._right[question.name])}")

    def _lose(self, question: Question, began: float, kind: str, exc: Exception) -> None:
        self.tally.lost[kind] += 1
        lasted = time.monotonic() - began
        self.tally.example(
            f"lost: {question.name} at {self._clock()}, {lasted:.1f} s after it was asked: {exc}"
        )

    def _salt(self, question: Question) -> str:
        if not question.family:
            return f"{self._rng.getrandbits(48):x}"
        epoch = int((time.monotonic() - self._began) / _FAMILY_EPOCH_S)
        return f"{question.family}-{epoch}"

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:.1f} s"


def _difference(got: Answer, right: Answer) -> str:
    for index, tokens in right.tokens.items():
        has = got.tokens.get(index, [])
        if has != tokens:
            same = next(
                (i for i, (a, b) in enumerate(zip(has, tokens, strict=False)) if a != b), len(has)
            )
            return (
                f"choice {index} differs from token {same} of {len(tokens)} on: "
                f"{has[same : same + 5]} instead of {tokens[same : same + 5]}; {len(has)} came"
            )
    return f"finish {got.finish} and usage {got.usage}, right {right.finish} and {right.usage}"
