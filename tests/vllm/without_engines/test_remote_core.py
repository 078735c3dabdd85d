"""The engine core of the Frontend's engine client, over a failover client that only records."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import SamplingParams
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.v1.engine import EngineCoreRequest, FinishReason

from dynamo_lite.protocol.errors import EngineDied
from dynamo_lite.protocol.generate import EngineError, TokenDelta
from dynamo_lite.vllm.frontend.remote_core import Deliveries, RemoteCore, SequenceEnd
from tests.unit.frontend_core import CoreScene


class Scene(CoreScene):
    """siblings: sequence id -> the other sequences of its request. In the place of vLLM's states of
    sequences."""

    def __init__(self, siblings: dict[str, list[str]]) -> None:
        super().__init__(in_flight=8)
        self.deliveries = Deliveries()
        self.failed: list[tuple[str, str]] = []
        self.raised: list[tuple[str, Exception]] = []
        self._siblings = siblings
        self.core = RemoteCore(self.intake, self.deliveries, causal=True)
        self.request_states: dict[str, Any] = {}
        self.core.processor = cast("Any", self)

    def abort_requests(self, request_ids: list[str], *, internal: bool) -> list[str]:
        [request_id] = request_ids
        assert internal
        return [request_id, *self._siblings.get(request_id, [])]

    def _fail(self, request_id: str, error: Exception) -> None:
        self.failed.append((request_id, str(error)))
        self.raised.append((request_id, error))

    async def add(self, request_id: str) -> None:
        queue = SimpleNamespace(put=partial(self._fail, request_id))
        self.request_states[request_id] = SimpleNamespace(queue=queue, parent_req=None)
        await self.core.add_request_async(
            EngineCoreRequest(
                request_id=request_id,
                external_req_id=request_id,
                prompt_token_ids=[1, 2, 3],
                mm_features=None,
                sampling_params=SamplingParams(),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )


async def test_deltas_and_errors_arrive_in_order():
    scene = Scene(siblings={"r1": ["r2"]})
    for request_id in ("r1", "r2", "r3"):
        await scene.add(request_id)
    assert scene.failover.submitted_ids == ["r1", "r2", "r3"] and scene.admission.in_flight == 3
    scene.deliveries.put_nowait([TokenDelta(request_id="r1", token_ids=[7])])
    scene.deliveries.put_nowait(SequenceEnd("r1", EngineDied("its engine died")))
    scene.deliveries.put_nowait(
        [TokenDelta(request_id="r3", token_ids=[8], finish_reason="length")]
    )
    [first] = (await scene.core.get_output_async()).outputs
    assert (first.request_id, first.new_token_ids) == ("r1", [7]) and scene.failed == []
    [output] = (await scene.core.get_output_async()).outputs
    assert (output.request_id, output.finish_reason) == ("r3", FinishReason.LENGTH)
    [(failed, why)] = scene.failed
    assert failed == "r1" and "its engine died" in why
    assert scene.failover.aborted == ["r2"] and scene.admission.in_flight == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError(message="bad grammar", invalid=True), 400),
        (EngineError(message="paused", retryable=True), 503),
        (EngineError(message="broken"), 500),
    ],
)
async def test_an_engine_s_error_reaches_the_client(error: EngineError, status: int):
    scene = Scene(siblings={"r1": ["r2"]})
    for request_id in ("r1", "r2"):
        await scene.add(request_id)
    scene.deliveries.put_nowait(
        [TokenDelta(request_id="r1", token_ids=[], finish_reason="error", error=error)]
    )
    await scene.core.get_output_async()
    [(failed, raised)] = scene.raised
    assert failed == "r1" and error.message in str(raised)
    found = create_error_response(raised)
    assert found.error.code == status and error.message in found.error.message
    assert "r2" in scene.failover.aborted and scene.admission.in_flight == 0
