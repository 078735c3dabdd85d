"""What decode and prefill engines do with vLLM's process: requests in, steps' outputs out.

Prompts come as token ids, and outputs leave as the engine produced them, one batch per step.
Detokenisation happens in the Frontend.
"""

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from dynamo_lite.disagg.counters import SPAN, RemotePrefillMetrics
from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.protocol.errors import EngineDied, Refused
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.vllm.engine.adapters import Adapters
from dynamo_lite.vllm.engine.process import EngineContext, EngineProcess


class VllmEngine(EngineProcess):
    """All calls come from one event loop."""

    def __init__(self, context: EngineContext, *, publishes_kv: bool = False):
        super().__init__(context, publishes_kv=publishes_kv)
        self._metrics = RemotePrefillMetrics(context.registry, context.on_drop)
        self._adapters = Adapters(lambda adapter: self._client.add_lora_async(adapter))
        self.load = EngineLoad()
        #: vLLM's last statistics of each data-parallel rank.
        self._stats: dict[int, SchedulerStats] = {}
        #: Those that have given tokens.
        self._gave_tokens: set[int] = set()

    async def _abort(self, own_ids: list[str]) -> None:
        if self._client is not None and own_ids:
            await self._client.abort_requests_async(own_ids)

    async def _add(self, request: EngineCoreRequest) -> None:
        try:
            await self._client.add_request_async(request)
        except EngineDeadError as exc:
            raise Refused("the engine's process has ended", elsewhere=True) from exc

    async def _loaded(self, adapter: Adapter | None) -> tuple[Adapter, LoRARequest] | None:
        """The request's adapter in this engine. Raises Refused."""
        if adapter is None:
            return None
        if self.config.lora_config is None:
            why = "this worker serves no LoRA adapters: set enable-lora for the workers"
            raise Refused(why, elsewhere=True)
        return await self._adapters.load(adapter)

    async def _next(self) -> EngineCoreOutputs | None:
        """Waits for one step's outputs; None if the engine is being closed."""
        if self._client is None:
            return None
        try:
            outputs: EngineCoreOutputs = await self._client.get_output_async()
        except EngineDeadError as exc:
            if self._client is None:
                return None
            raise EngineDied(str(exc)) from exc
        if (stats := outputs.scheduler_stats) is not None:
            self._stats[outputs.engine_index] = stats
            if any(output.new_token_ids for output in outputs.outputs):
                self._gave_tokens.add(outputs.engine_index)
            ranks, config = self._stats.values(), self.config
            size = config.parallel_config.data_parallel_size
            self.load = EngineLoad(
                running=sum(each.num_running_reqs for each in ranks),
                # vLLM has a separate count of requests that its last step could not schedule.
                waiting=sum(e.num_waiting_reqs + e.num_skipped_waiting_reqs for e in ranks),
                kv_usage=sum(each.kv_cache_usage for each in ranks) / size,
                gave_tokens=len(self._gave_tokens) == size,
                max_running=config.scheduler_config.max_num_seqs * size,
            )
            # Without remote prefills they are those of a connector of the user.
            if self._engine_config is not None and (counts := stats.kv_connector_stats):
                self._metrics.apply(counts)
                if (tracer := self._context.tracer) is not None:
                    tracer.record_notes(counts.get(SPAN, ()))
        return outputs

    async def _close(self) -> None:
        await self._adapters.close()
        await super()._close()
