"""Stock vLLM's process behind the engine seam: its start, its status, its end.

The component's process holds vLLM's engine-core client, and nothing of vLLM's front half.
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
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from dynamo_lite.disagg.engine_config import EngineConfig, write_engine_config
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import NoResponders, ProtocolError, StartupError
from dynamo_lite.protocol.health import EngineStatus, decode_engine_status, joined
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.fingerprint import fingerprint
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
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


class EngineProcess:
    """vLLM's process while the context is open. publishes_kv: whether its blocks are published."""

    def __init__(self, context: EngineContext, *, publishes_kv: bool):
        self._context, self._engine_config = context, context.engine_config
        self._publishes_kv = publishes_kv
        #: What publishes the engine's blocks; None before the start, and if nothing does.
        self.kv_events: VllmKvEvents | None = None
        #: vLLM's client; None before the start and after the end.
        self._client: Any = None
        #: Set when it is loaded.
        self.config: VllmConfig
        self._rules: FirstTokenRules | None = None
        #: The model's length when it was loaded.
        self._loaded_len: int | None = None
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="engine-start")
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
                self.kv_events.follow(await self._kv_groups())
            one_group = all(each.num_groups == 1 for each in self.metadata)
            self._rules = FirstTokenRules(self.config, one_group=one_group)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

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

    async def _kv_groups(self) -> Any:
        """vLLM does not end the call when the engine dies meanwhile. Raises StartupError."""
        try:
            async with asyncio.timeout(_DESCRIBE_S):
                return await self._client.call_utility_async("get_kv_cache_group_metadata")
        except TimeoutError as exc:
            raise StartupError("the engine's process does not answer") from exc

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
        context = self._context
        self.config = config = self._configure()
        if self._publishes_kv and config.kv_events_config is not None:
            self.kv_events = VllmKvEvents(config, context.on_drop)
        self._loaded_len = config.model_config.max_model_len
        with refusal_reported(context.engine_config_path):
            return EngineCoreClient.make_async_mp_client(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
            )

    async def _close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await self._in_thread(client.shutdown)
        self._starter.shutdown(wait=False)
        with contextlib.suppress(FileNotFoundError):
            self._context.engine_config_path.unlink()
