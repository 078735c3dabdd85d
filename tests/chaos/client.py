"""One completion request over a connection of its own, and how it ended.

It distinguishes what a client can distinguish: an answer, a refusal before anything began, a
refused connection, and everything else, which is a lost request.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

PATIENCE_S = 110.0
#: The timeout that the server gets: a little less, so that its error arrives.
_TIMEOUT_HEADER_S = 100


@dataclass
class Answer:
    """tokens: by choice. finish: by choice. usage: completion tokens.

    first_s: seconds until the first token. arrivals: when each piece of a stream came
    (`time.monotonic()`).
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: int = 0
    first_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    @property
    def gap_s(self) -> float:
        """The longest time between two pieces of a stream."""
        return max((b - a for a, b in pairwise(self.arrivals)), default=0.0)

    def same(self, other: "Answer") -> bool:
        return (self.tokens, self.finish, self.usage) == (other.tokens, other.finish, other.usage)


class Refused(Exception):
    """Not begun: 429 or 503, or the connection was refused. Retry later."""

    def __init__(self, kind: str, retry_after_s: float, text: str = ""):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.retry_after_s = retry_after_s


class Failed(Exception):
    """An error instead of an answer or in the middle of one, or its connection has broken. kind:
    for counting."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


async def ask(
    port: int, body: dict[str, Any], host: str = "127.0.0.1", api_key: str = ""
) -> Answer:
    """Raises Refused, Failed, or TimeoutError after PATIENCE_S.

    Cancelling it closes the connection at once, as a client that has left.
    """
    headers = {"X-Request-Timeout": f"{_TIMEOUT_HEADER_S}"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    url, sent = f"http://{host}:{port}/v1/completions", time.monotonic()
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout()
        ) as http,
    ):
        try:
            async with http.post(url, json=body, headers=headers) as reply:
                return await _receive(reply, body["stream"], sent)
        except aiohttp.ClientConnectorError as exc:
            raise Refused("connect", 0.5, str(exc)) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Failed("broken connection", repr(exc)) from exc


async def _receive(reply: aiohttp.ClientResponse, streamed: bool, sent: float) -> Answer:
    if reply.status != 200:
        text = (await reply.read()).decode(errors="replace")
        if reply.status in (429, 503) and "Retry-After" in reply.headers:
            after_s = float(reply.headers["Retry-After"])
            raise Refused(str(reply.status), after_s, text[:300])
        raise Failed(str(reply.status), text[:500])
    answer, done = Answer(), False
    if not streamed:
        _take(answer, json.loads(await reply.read()))
        answer.first_s = time.monotonic() - sent
        return answer
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        if (event := line[6:].strip()) == b"[DONE]":
            done = True
            continue
        message = json.loads(event)
        if "error" in message:
            error = message["error"]
            code = error.get("code") if isinstance(error, dict) else ""
            raise Failed(f"event {code}", str(error))
        _take(answer, message)
        answer.arrivals.append(time.monotonic())
    if not done:
        raise Failed("broken connection", "the stream ended early")
    if answer.arrivals:
        answer.first_s = answer.arrivals[0] - sent
    return answer


def _take(answer: Answer, message: dict[str, Any]) -> None:
    if message.get("usage"):
        answer.usage = message["usage"]["completion_tokens"]
    for choice in message["choices"]:
        index = choice["index"]
        answer.tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
        if choice.get("finish_reason"):
            answer.finish[index] = choice["finish_reason"]
