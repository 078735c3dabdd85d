"""The shipped graph around engines that compute nothing, with decode workers that send their long
prompts to prefill workers: by the shipped decision, through the shipped queue."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Self

from prometheus_client import Counter

from dynamo_lite.disagg.decision.rule import Remote, decide
from dynamo_lite.disagg.engine import DecodeEngine
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import DecisionThresholds, subset
from dynamo_lite.protocol.prefill import Done
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.services import FRONTEND, PROCESSOR, Service
from tests.builders import prefill_job
from tests.process import null_graph, rights_graph
from tests.process.null_decode import PUSH_TIMEOUT_S, decode_engine


def answer(prompt_tokens: int, tokens: int) -> str:
    """The text of an answer, which depends on the prompt's length."""
    letters = null_graph.LETTERS
    return "".join(letters[(prompt_tokens + i) % len(letters)] for i in range(tokens))


def _token_at(prompt: list[int], position: int) -> int:
    return null_graph.FIRST_TOKEN + (len(prompt) + position) % len(null_graph.LETTERS)


class AskingEngine(null_graph.PacedEngine):
    """A request with a remote prefill gets its first token after the prefill's end."""

    def __init__(self, step_s: float, host: Host, config: VllmWorkerConfig):
        super().__init__(step_s, _token_at)
        self._host, self._config = host, config
        self._queue_config = replace(QueueConfig.of(config.queue), push_timeout_s=PUSH_TIMEOUT_S)
        self._id = f"e{host.lease.id:x}"
        self._stack = AsyncExitStack()
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        #: By attempt, which is named as its request.
        self._waiting: dict[str, GenerateRequest] = {}
        self._decisions = Counter(
            "dynamo_lite_prefill_decisions",
            "As of a real engine",
            ["reason", "verdict"],
            registry=host.registry,
        )

    async def __aenter__(self) -> Self:
        spec, enter = self._host.spec, self._stack.enter_async_context
        prefix = names.endpoint_prefix(spec.namespace, "PrefillWorker", "prefill")
        self._writers = await enter(Roster(self._host.store, prefix))
        self._queue = await enter(
            decode_engine(
                nats_url=spec.nats_url,
                etcd_url=spec.etcd_url,
                namespace=spec.namespace,
                done=self._done,
                engine_id=self._id,
                config=self._queue_config,
            )
        )
        self._host.spawn(self._follow(), "ends of remote prefills")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self._stack.aclose()

    async def submit(self, request: GenerateRequest) -> None:
        seen = QueueSeen(
            jobs=(await self._queue.depth()).jobs,
            prefill_workers=len(self._writers.members),
            age_s=0.0,
        )
        tokens = len(request.prompt_token_ids)
        inputs = DecisionInputs(prompt_tokens=tokens, cached_tokens=0, queue=seen)
        verdict = decide(inputs, subset(DecisionThresholds, self._config))
        remote = isinstance(verdict, Remote)
        self._decisions.labels(verdict.reason.value, "remote" if remote else "local").inc()
        if not remote:
            await super().submit(request)
            return
        attempt = request.request_id
        self._waiting[attempt] = request
        job = prefill_job(attempt, engine_id=self._id)
        lane = self._queue_config.lane_of(tokens, 0)
        await self._queue.push(encode(job), message_id=attempt, lane=lane)

    async def _follow(self) -> None:
        while True:
            said = await self._done.get()
            # One that is not written is never answered, which the test notices.
            if said.outcome == "written" and (request := self._waiting.pop(said.attempt, None)):
                await super().submit(request)


class AskingBackend(null_graph.NullBackend):
    def open_decode_engine(
        self, host: Host, config: VllmWorkerConfig
    ) -> AbstractAsyncContextManager[DecodeEngine]:
        return AskingEngine(self._step_s, host, config)


class AskingWorker(null_graph.NullWorker):
    """Component."""

    backend = AskingBackend


_DECODE = Service(
    name="VllmWorker",
    config=null_graph.NullWorkerConfig,
    component=f"{__name__}:AskingWorker",
    flags="engine",
)
[_PREFILL] = [one for one in rights_graph.Disagg.services if one.name == "PrefillWorker"]
#: As `graphs.disagg`.
Frontend = FRONTEND.link(PROCESSOR).link(_DECODE).link(_PREFILL)
