"""vLLM's AsyncLLM without a local engine core.

`generate()`, the fan-out of `n > 1`, stop strings, logprobs, detokenisation, admission
limits and error mapping are vLLM's own code. Overridden are the constructor and the ends of
a request that do not occur with a local engine.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.loggers import StatLoggerManager

from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.vllm.frontend.remote_core import RemoteCore

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RemoteEngineClient(AsyncLLM):
    """The engine client of the OpenAI app.

    The constructor loads the tokenizer, which may take seconds, and runs without an event
    loop; all other methods need one.
    log_stats: whether vLLM's request metrics are kept (`/metrics` of the app).
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        core: RemoteCore,
        *,
        log_stats: bool,
        log_requests: bool,
    ):
        # AsyncLLM's constructor starts an engine process, so it is not called.
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = log_requests
        self.log_stats = log_stats
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.admission_stats = None
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer,
            log_stats=log_stats,
            stream_interval=vllm_config.scheduler_config.stream_interval,
            tracing_enabled=vllm_config.observability_config.otlp_traces_endpoint is not None,
        )
        self.engine_core: Any = core
        core.fail = self._fail
        self.logger_manager = StatLoggerManager(vllm_config, engine_idxs=[0]) if log_stats else None
        self.profiler = None
        self._client_count = 1
        self._elastic_ep_lock = asyncio.Lock()
        self._profile_lock = asyncio.Lock()
        self._profile_session_guard_enabled = True
        self._profile_session_active = False
        self._frontend_profiler_injected = False
        self._frontend_profiler_worker_name = None
        self.output_handler: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task that passes the workers' outputs to the requests."""
        self._run_output_handler()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Also refuses, before a stream begins, if no worker is live or this process is full."""
        super().check_admission(n, request_id)
        self.engine_core.check_admission(n)

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: Any,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        # A local engine takes every request. A worker may refuse, or the caller may cancel
        # while the request is being placed: then its state must be removed.
        try:
            await super()._add_request(request, prompt, parent_req, index, queue)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    def _fail(self, request_id: str, error: Exception) -> list[str]:
        """Ends the request of one sequence with `error`; returns its other sequences."""
        state = self.output_processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return []
        owner = request_id if state.parent_req is None else state.parent_req.request_id
        ended = self.output_processor.abort_requests([owner], internal=True)
        state.queue.put(error)
        return [other for other in ended if other != request_id]

    async def close(self) -> None:
        """Ends open requests with vLLM's own errors and stops the output task."""
        handler = self.output_handler
        self.shutdown()
        if handler is not None:
            await end_tasks(handler)
