"""What is asked, and what is right: a fixed set of requests and their one answer.

Every answer is decided by its request alone (greedy, or random with a seed), so
that one plain vLLM server can say once what a graph must say at any time.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.client import Answer, ask
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import PlainServer

#: Questions of one family begin with the same tokens.
_FAMILIES = {"": 0, "small": 96, "large": 640}


#: Of the plain server's requests.
_AT_A_TIME = 4


@dataclass(frozen=True)
class Question:
    """body: of a completion request. family: requests with the same beginning of the prompt.

    Prefix caches are kept apart by a salt: with a fresh one nothing of the
    prompt is known to any engine, and a long prompt is prefilled remotely again.
    """

    name: str
    body: dict[str, Any] = field(repr=False)
    family: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.body["prompt"])

    def salted(self, salt: str) -> dict[str, Any]:
        return {**self.body, "cache_salt": salt}


#: What is asked, and what is right, by the question's name.
Known = tuple[list[Question], dict[str, Answer]]


def questions(seed: int = 0) -> list[Question]:
    """Short and long, streamed and not, greedy and seeded, one choice and two."""
    rng = random.Random(seed)
    made: list[Question] = []

    def add(kind: str, count: int, low: int, high: int, family: str = "", **more: Any) -> None:
        for _ in range(count):
            number = len(made)
            shared = prompt_ids(_FAMILIES[family], seed=seed)
            prompt = shared + prompt_ids(rng.randrange(low, high), seed=1000 * seed + number)
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": rng.randrange(30, 160),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": number % 4 != 3,
                **more,
            }
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            made.append(Question(f"{kind}-{number}", body, family))

    add("short", 9, 20, 250)
    add("long", 11, 400, 2400)
    add("prefix", 4, 10, 120, "small")
    add("prefix-long", 5, 40, 900, "large")
    add("talk", 4, 30, 120, max_tokens=500)
    add("seeded", 4, 20, 1200, temperature=0.8, seed=7)
    add("two", 4, 20, 1200, temperature=0.9, seed=11, n=2)
    add("penalty", 3, 20, 800, frequency_penalty=0.7, presence_penalty=0.3)
    return made


async def answers(url: str, asked: list[Question]) -> dict[str, Answer]:
    """What a plain server at `url` answers, by the question's name. None may fail."""
    port, gate = int(url.rpartition(":")[2]), asyncio.Semaphore(_AT_A_TIME)

    async def one(question: Question) -> tuple[str, Answer]:
        async with gate:
            return question.name, await ask(port, question.salted("reference"))

    # Alone, so that no prompt is computed in parts (see configs/chaos.yaml).
    seeded = [await one(q) for q in asked if "seed" in q.body]
    greedy = await asyncio.gather(*(one(q) for q in asked if "seed" not in q.body))
    return dict([*seeded, *greedy])


async def right_answers(
    directory: Path, asked: list[Question], graph: tuple[str, str], say: Callable[[str], None]
) -> Known:
    """What one plain engine answers that is configured as `graph`'s."""
    say(f"{len(asked)} questions to a plain vLLM server")
    with PlainServer(directory / "plain", graph) as server:
        return asked, await answers(await asyncio.to_thread(lambda: server.url), asked)
