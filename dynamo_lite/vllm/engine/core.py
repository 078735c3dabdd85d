"""Stock vLLM behind the engine seam.

The component's process holds vLLM's engine-core client, and nothing of vLLM's front half:
prompts come as token ids, and outputs leave as the engine produced them, one batch per step.
Detokenisation happens in the Frontend.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import SchedulerStats

from dynamo_lite.disagg.counters import SPAN, RemotePrefillMetrics
from dynamo_lite.disagg.engine import EngineLoad
from dynamo_lite.disagg.engine_config import EngineConfig, write_engine_config
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    EngineDied,
    NoResponders,
    ProtocolError,
    Refused,
    StartupError,
)
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.protocol.health import EngineStatus, decode_engine_status, joined
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.engine.adapters import Adapters
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.fingerprint import fingerprint
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents, followed
from dynamo_lite.vllm.engine.supported import refusal_reported
from dynamo_lite.vllm.first_token import FirstTokenRules

_DESCRIBE_S = 5.0


@dataclass(frozen=True)
class EngineContext:
    """What an engine gets from its component."""

    #: Flags of `vllm serve`.
    args: list[str]
    #: Configuration of the connector; None for an engine without remote prefills.
    engine_config: EngineConfig | None
    #: File with `engine_config`, for the engine's processes.
    engine_config_path: Path
    messaging: Messaging
    registry: CollectorRegistry
    on_drop: OnDrop = uncounted
    #: Records the spans that the engine's processes note.
    tracer: Tracer | None = None


class VllmEngine:
    """What decode and prefill engines share: vLLM's process, its status and its load.

    All calls come from one event loop. publishes_kv: whether the engine's blocks are published.
    """

    def __init__(self, context: EngineContext, *, publishes_kv: bool = False):
        self._context, self._engine_config = context, context.engine_config
        self._metrics = RemotePrefillMetrics(context.registry, context.on_drop)
        self._publishes_kv = publishes_kv
        #: What publishes the engine's blocks; None before the start, and if nothing does.
        self.kv_events: VllmKvEvents | None = None
        #: vLLM's client; None before the start and after the end.
        self._client: Any = None
        self._config: VllmConfig | None = None
        self._rules: FirstTokenRules | None = None
        #: The model's length when it was loaded.
        self._loaded_len: int | None = None
        self._adapters = Adapters(lambda adapter: self._client.add_lora_async(adapter))
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="engine-start")
        self.load = EngineLoad()
        #: vLLM's last statistics of each data-parallel rank.
        self._stats: dict[int, SchedulerStats] = {}
        #: Those that have given tokens.
        self._gave_tokens: set[int] = set()
        self.metadata: Sequence[EngineMetadata] = ()

    async def __aenter__(self) -> Self:
        config = self._engine_config
        if config is not None:
            write_engine_config(self._context.engine_config_path, config)
        try:
            self._client = await self._in_thread(self._load)
            if config is not None:
                described = [status.metadata for status in await self._statuses()]
                ttl_s = config.lease_ttl_s
                self.metadata = await self._in_thread(
                    lambda: [self._fingerprinted(each, ttl_s) for each in described]
                )
            if self.kv_events is not None:
                groups = await self._client.call_utility_async("get_kv_cache_group_metadata")
                self.kv_events.follow(groups)
            one_group = all(each.num_groups == 1 for each in self.metadata)
            self._rules = FirstTokenRules(self.config, one_group=one_group)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def config(self) -> VllmConfig:
        assert self._config is not None
        return self._config

    @property
    def model(self) -> str:
        return self.config.model_config.model

    async def describe(self) -> EngineStatus:
        """Requests the status of the engine's processes over NATS.

        Raises Unavailable, DeadlineExceeded, ProtocolError, StartupError.
        """
        return joined(await self._statuses())

    async def _statuses(self) -> list[EngineStatus]:
        """One for each data-parallel rank, to whose engine id vLLM adds its number."""
        config, ranks = self._engine_config, self.config.parallel_config.data_parallel_size
        assert config is not None
        own = config.engine_id
        ids = [own] if ranks == 1 else [f"{own}_dp{rank}" for rank in range(ranks)]
        asked = (self._status(names.describe_subject(config.namespace, each)) for each in ids)
        return await asyncio.gather(*asked)

    async def _status(self, subject: str) -> EngineStatus:
        try:
            reply = await self._context.messaging.request(subject, b"", timeout_s=_DESCRIBE_S)
        except NoResponders as exc:
            raise StartupError("the engine's process does not answer on NATS") from exc
        try:
            return decode_engine_status(reply)
        except ProtocolError:
            self._context.on_drop("describe_reply")
            raise

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

    def _fingerprinted(self, described: EngineMetadata, lease_ttl_s: float) -> EngineMetadata:
        """Completes the fingerprint; the engine's process has only set what its ranks know."""
        made = fingerprint(self.config, described.fingerprint, max_model_len=self._loaded_len)
        # A decode engine waits for the last write of a lost writer by its own time-to-live.
        made["lease_ttl_s"] = f"{lease_ttl_s:g}"
        return msgspec.structs.replace(described, fingerprint=made)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Loading takes many seconds, and the event loop must keep running."""
        return await asyncio.get_running_loop().run_in_executor(self._starter, work)

    def _configure(self) -> VllmConfig:
        """Called in a thread, before the engine's processes are started."""
        context = self._context
        return vllm_config(
            context.args,
            self._engine_config,
            context.engine_config_path,
            kv_events=self._publishes_kv,
        )

    def _load(self) -> Any:
        context, config = self._context, self._configure()
        self._config = config
        if self._publishes_kv:
            self.kv_events = followed(config, context.on_drop)
        self._loaded_len = config.model_config.max_model_len
        with refusal_reported(context.engine_config_path):
            return EngineCoreClient.make_async_mp_client(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
            )

    async def _close(self) -> None:
        await self._adapters.close()
        if self._client is not None:
            client, self._client = self._client, None
            await self._in_thread(client.shutdown)
        self._starter.shutdown(wait=False)
        with contextlib.suppress(FileNotFoundError):
            self._context.engine_config_path.unlink()
