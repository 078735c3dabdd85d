"""Requests to two servers, and answers in a form that can be compared."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.vllm.seams import vllm_minor

_OWN = ("id", "created", "system_fingerprint")

WORDS = "the rain in spain stays mainly on a plain and the tide at sea does not".split()

#: Close enough: a prompt may be computed in other chunks than the reference's.
LOGPROB_TOLERANCE = 2e-3


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def prompt_ids(tokens: int, seed: int) -> list[int]:
    """Token ids of ordinary pieces; the same for the same arguments."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(5, 512) for _ in range(tokens)]


def prose(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def ask(url: str, kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer of one server. kind: "chat" or "completions"; streams are put together."""
    with client(url) as api:
        create = api.chat.completions.create if kind == "chat" else api.completions.create
        answer = create(model="tiny", **request)
        if request.get("stream"):
            return joined(chunk.model_dump() for chunk in answer)
        return _whole(answer.model_dump())


async def tokens_of(
    url: str, requests: Sequence[dict[str, Any]], concurrency: int = 8
) -> list[list[int]]:
    """The greedy tokens of completion requests, all of `max_tokens`. No request may fail."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def one(request: dict[str, Any]) -> list[int]:
            body = {
                "model": "tiny",
                **request,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with gate:
                answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            tokens = answer.json()["choices"][0]["token_ids"]
            assert len(tokens) == request["max_tokens"]
            return tokens

        return list(await asyncio.gather(*(one(request) for request in requests)))


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    # The fingerprint is a digest of the server's configuration, ours has more in it.
    answer = {k: v for k, v in answer.items() if k not in _OWN}
    answer["usage"].pop("prompt_tokens_details")  # they depend on what was asked before
    for choice in answer["choices"]:
        _drop_tool_ids(choice.get("message"))
    return answer


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a stream adds up to, however it was cut into chunks."""
    usage, choices = None, {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        (usage or {}).pop("prompt_tokens_details", None)
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"],
                {"text": "", "reasoning": "", "arguments": "", "names": [], "logprobs": []},
            )
            delta = piece.get("delta") or {}
            choice["text"] += piece.get("text") or delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                choice["arguments"] += function.get("arguments") or ""
                choice["names"] += [function["name"]] if function.get("name") else []
            choice["logprobs"] += _rows(piece.get("logprobs"))
            for key in ("finish_reason", "stop_reason"):
                if piece.get(key) is not None:
                    assert key not in choice, f"{key} came twice"
                    choice[key] = piece[key]
    return {"usage": usage, "choices": [choices[i] for i in sorted(choices)]}


def _rows(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or ())
    fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    if vllm_minor() < 32:
        fields = fields[:-1]  # in a stream they depend on how its tokens are spread over chunks
    return list(zip(*(logprobs[field] for field in fields), strict=True))


def _drop_tool_ids(message: dict[str, Any] | None) -> None:
    for call in (message or {}).get("tool_calls") or ():
        del call["id"]  # random


def assert_same(got: Any, expected: Any, where: str = "answer") -> None:
    """Equal in everything, and close where a number is not whole (log-probabilities)."""
    assert type(got) is type(expected), f"{where}: {got!r} is not {expected!r}"
    if isinstance(got, dict):
        assert got.keys() == expected.keys(), f"{where}: {got.keys()} are not {expected.keys()}"
        for key in got:
            assert_same(got[key], expected[key], f"{where}.{key}")
    elif isinstance(got, list | tuple):
        assert len(got) == len(expected), f"{where}: {got!r} is not {expected!r}"
        for index, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(got, float):
        assert got == pytest.approx(expected, abs=LOGPROB_TOLERANCE), where
    else:
        assert got == expected, f"{where}: {got!r} is not {expected!r}"


@dataclass
class Stream:
    """A streamed answer. chunks: what has come of it so far. ended: whether that is all."""

    kind: str
    body: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    async def run(self, http: httpx.AsyncClient) -> dict[str, Any]:
        body = {
            **self.body,
            "model": "tiny",
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        async with http.stream("POST", f"/v1/{self.kind}", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            lines = [line async for line in self._lines(answer)]
        self.ended = True
        assert lines[-1] == "[DONE]", lines[-1]
        return {**joined(self.chunks), "tokens": self.tokens()}

    async def _lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        async for line in answer.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                if data != "[DONE]":
                    chunk = json.loads(data)
                    assert "error" not in chunk, chunk
                    self.chunks.append(chunk)
                yield data

    def tokens(self) -> dict[int, list[int]]:
        """By choice: what was generated."""
        tokens: dict[int, list[int]] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        return tokens
