"""vLLM's AsyncLLM without a local engine core.

`generate()`, the fan-out of `n > 1`, stop strings, logprobs, detokenisation, admission
limits and error mapping are vLLM's own code. Overridden are the constructor and the admission.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from vllm.renderers import renderer_from_config
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
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
        core.processor = self.output_processor
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

    async def close(self) -> None:
        """Ends open requests with vLLM's own errors and stops the output task."""
        handler = self.output_handler
        self.shutdown()
        if handler is not None:
            await end_tasks(handler)
