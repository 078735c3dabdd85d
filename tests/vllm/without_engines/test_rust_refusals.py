"""What clients of vLLM's Rust frontend get for refusals, over a failover client without workers."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    NoWorkers,
    Overloaded,
    StartupError,
    WorkerLost,
)
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.failover import OnEnded
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.services.frontend.http import url_of
from dynamo_lite.vllm.frontend.intake import Intake
from dynamo_lite.vllm.frontend.rust_edge import open_rust_edge
from tests.unit.frontend_core import CoreScene, RecordingFailover
from tests.vllm.graph import MODEL
from tests.vllm.test_rust_edge import BINARY, NEEDS_BINARY

pytestmark = [pytest.mark.timeout(120), NEEDS_BINARY]

TEXT = {"model": "tiny", "prompt": [70, 71], "max_tokens": 4}


class Answering(RecordingFailover):
    """Answers each request with one token. lost: raised after it, in place of the end."""

    def __init__(self, intake: Intake):
        super().__init__()
        self.lost: WorkerLost | None = None
        self._intake = intake
        intake._failover = cast("Any", self)

    async def open_intake(self, on_deltas: OnDeltas, on_ended: OnEnded) -> Intake:
        self._on_deltas, self._on_ended = on_deltas, on_ended
        return self._intake

    async def submit(self, message: GenerateRequest, movable: MigrationPlan) -> None:
        await super().submit(message, movable)
        reason = "length" if self.lost is None else None
        self._on_deltas([TokenDelta(message.request_id, [72], finish_reason=reason)])
        if self.lost is not None:
            self._on_ended(message.request_id, self.lost)


@asynccontextmanager
async def served(*more: str) -> AsyncIterator[tuple[Answering, CoreScene, httpx.AsyncClient]]:
    assert BINARY is not None
    scene = CoreScene(in_flight=1)
    failover = Answering(scene.intake)
    flags = [f"--model={MODEL}", "--served-model-name=tiny", "--dtype=float32", *more]
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        async with (
            open_rust_edge(
                flags, BINARY, sock, url, failover.open_intake, timeout_s=60.0, grace_s=0
            ),
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            yield failover, scene, http


async def events(http: httpx.AsyncClient) -> tuple[int, list[str]]:
    answer = await http.post("/v1/completions", json={**TEXT, "stream": True})
    lines = answer.text.splitlines()
    return answer.status_code, [line.removeprefix("data: ") for line in lines if line]


async def test_a_parser_that_it_does_not_have_ends_its_start():
    with pytest.raises(StartupError, match="reasoning parser `openai_gptoss` is not registered"):
        async with served("--reasoning-parser=openai_gptoss"):
            pass


async def test_refusals_losses_and_what_is_read_of_the_headers():
    async with served() as (failover, scene, http):
        for refusal in (NoWorkers("none"), Overloaded("busy"), DeadlineExceeded("it", 60.0)):
            failover.refusal = refusal
            answer = await http.post("/v1/completions", json=TEXT)
            assert answer.status_code == 500 and "retry-after" not in answer.headers
            assert answer.json()["error"]["message"] == "Internal server error"
            status, data = await events(http)
            assert (status, data[-1]) == (200, "[DONE]")
            assert "error" in json.loads(data[-2])
            assert not any(_text(event) for event in data[:-2])
        failover.refusal = None
        failover.lost = WorkerLost("gone")
        status, data = await events(http)
        assert (status, data[-1]) == (200, "[DONE]")
        assert "error" in json.loads(data[-2]) and _text(data[0])
        failover.lost = None

        headers = {"x-session-id": "s", "x-request-id": "mine", "x-vllm-priority": "3"}
        answer = await http.post("/v1/completions", json=TEXT, headers=headers)
        assert answer.status_code == 200
        message = failover.submitted[-1]
        assert (message.session, message.priority) == ("s", 3)
        assert message.request_id.startswith("cmpl-mine")
        long = {"x-request-id": "r" * 300}
        assert (await http.post("/v1/completions", json=TEXT, headers=long)).status_code == 500

        scene.admission.enter("other", 1)
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 500
        assert scene.refused["limit"] == 1


def _text(event: str) -> str:
    choices: Sequence[dict[str, Any]] = json.loads(event).get("choices") or ()
    return "".join(choice["text"] for choice in choices)
