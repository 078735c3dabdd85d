"""The client of benchmarks/disagg.py: streamed completions, and when each event came."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

_ANSWER_S = 240.0
_EVENT = b'data: {"'
_DONE = b"data: [DONE]"
_FAILED = b'data: {"error'
_VOCABULARY = range(10, 500)


@dataclass
class Streamed:
    """One answer; times of `time.perf_counter`. events: one per streamed token or tokens."""

    prompt_tokens: int
    max_tokens: int
    sent: float
    events: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.events[0] - self.sent

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds from each event in this span to the next one, whenever that came."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return [after - now for now, after in pairs if since <= now < until]


def prompt_of(tokens: int, rng: random.Random) -> list[int]:
    """Random, so that no prefix cache holds any of it."""
    return rng.choices(_VOCABULARY, k=tokens)


async def ask(
    port: int, prompt: list[int], max_tokens: int, into: list[Streamed] | None = None
) -> Streamed:
    """One request on a connection of its own. `into` gets the answer when it is asked for.

    Raises RuntimeError for an answer that fails, or ends without an event.
    """
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    async with asyncio.timeout(_ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            answer = Streamed(len(prompt), max_tokens, time.perf_counter())
            if into is not None:
                into.append(answer)
            writer.write(head.encode() + payload)
            status = await reader.readuntil(b"\r\n\r\n")
            if not status.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"answered {status.splitlines()[0].decode()}")
            await _read_events(reader, answer)
        finally:
            writer.close()
    return answer


async def _read_events(reader: asyncio.StreamReader, answer: Streamed) -> None:
    data = b""
    while _DONE not in data:
        # What may be the beginning of a mark is looked at again, a whole mark is not.
        last = data.rfind(_EVENT)
        rest = data[last + len(_EVENT) :] if last >= 0 else data
        part = await reader.read(1 << 16)
        now = time.perf_counter()
        if not part:
            raise RuntimeError(f"an answer ended after {len(answer.events)} events")
        data = rest[-16:] + part
        if _FAILED in data:
            raise RuntimeError(f"an answer failed: {data[data.index(_FAILED) :][:200]!r}")
        answer.events += [now] * data.count(_EVENT)
    if not answer.events:
        raise RuntimeError("an answer without an event")
