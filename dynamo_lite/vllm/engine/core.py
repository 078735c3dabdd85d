"""Stock vLLM behind the engine seam.

The component's process holds vLLM's engine-core client, and nothing of vLLM's front half:
prompts come as token ids, and outputs leave as the engine produced them, one batch per step.
Detokenisation happens in the Frontend.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_lite.disagg.counters import PREFLIGHT, SPAN
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.metrics import RemotePrefillMetrics
from dynamo_lite.disagg.prefill.link_test_client import LinkTestClient
from dynamo_lite.engine.base import EngineLoad, KvEvents
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import (
    EngineDied,
    NoResponders,
    ProtocolError,
    Refused,
    StartupError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import (
    EngineStatus,
    Listen,
    decode_engine_status,
)
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tracing.tracer import Tracer, record_notes
from dynamo_lite.vllm.engine.connector_types import KV_LAYOUT
from dynamo_lite.vllm.engine.fingerprint import fingerprint
from dynamo_lite.vllm.engine.kept_core import KeptCore
from dynamo_lite.vllm.engine.running_core import RunningCore

logger = logging.getLogger(__name__)

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
    #: Outlives this role; None: the engine is started with the role and ends with it.
    kept: KeptCore | None = None


class VllmEngine:
    """What decode and prefill engines share: vLLM's process in one role, its status and its load.

    publishes_kv: whether the engine's blocks are published.
    """

    def __init__(self, context: EngineContext, *, publishes_kv: bool = False):
        self._context, self._engine_config = context, context.engine_config
        self._metrics = RemotePrefillMetrics(context.registry, context.on_drop)
        kept = context.kept
        if kept is None:
            self._core = RunningCore(context.args, context.on_drop if publishes_kv else None)
        else:
            self._core = kept.of_role(context.args, context.on_drop)
        self._publishes_kv = publishes_kv
        #: vLLM's client while this role lasts.
        self._client: Any = None
        self._link_tests = (
            None
            if self._engine_config is None
            else LinkTestClient(self._engine_config, context.messaging, self._wake)
        )
        self.load = EngineLoad()
        self.metadata: EngineMetadata | None = None

    async def __aenter__(self) -> Self:
        core, config, file = self._core, self._engine_config, self._context.engine_config_path
        try:
            if core.client is None:
                await core.start(config, file)
                if self._context.kept is not None:
                    self._context.kept.started()
            else:
                assert config is not None
                await core.change_role(config, file, self._context.messaging)
            self._client = core.client
            if config is not None:
                described, ttl_s = (await self.describe()).metadata, config.lease_ttl_s
                self.metadata = await core.in_thread(lambda: self._fingerprinted(described, ttl_s))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def config(self) -> VllmConfig:
        return self._core.config

    @property
    def model(self) -> str:
        return self.config.model_config.model

    @property
    def kv_events(self) -> KvEvents | None:
        """What publishes the engine's blocks; None if nothing does."""
        if not self._publishes_kv:
            return None
        kept = self._context.kept
        return self._core.kv_events if kept is None else kept.events

    async def describe(self) -> EngineStatus:
        """Requests the status of the engine's process over NATS.

        Raises Unavailable, DeadlineExceeded, ProtocolError, StartupError.
        """
        config = self._engine_config
        assert config is not None
        subject = names.describe_subject(config.namespace, config.engine_id)
        try:
            reply = await self._context.messaging.request(subject, b"", timeout_s=_DESCRIBE_S)
        except NoResponders as exc:
            raise StartupError("the engine's process does not answer on NATS") from exc
        try:
            return decode_engine_status(reply)
        except ProtocolError:
            self._context.on_drop("describe_reply")
            raise

    async def listen(self, listen: Listen) -> None:
        assert self._link_tests is not None
        await self._link_tests.listen(listen)

    async def _wake(self) -> None:
        """Any call makes an idle engine core check for steps to make."""
        try:
            if self._client is not None:
                await self._core.wake()
        except EngineDeadError as exc:
            raise Unavailable("the engine's process has ended") from exc

    async def _abort(self, own_ids: list[str]) -> None:
        if self._client is not None and own_ids:
            await self._client.abort_requests_async(own_ids)

    async def _add(self, request: EngineCoreRequest) -> None:
        try:
            await self._client.add_request_async(request)
        except EngineDeadError as exc:
            raise Refused("the engine's process has ended", elsewhere=True) from exc

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
            self.load = EngineLoad(
                running=stats.num_running_reqs,
                # vLLM has a separate count of requests that its last step could not schedule.
                waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                kv_usage=stats.kv_cache_usage,
                gave_tokens=self.load.gave_tokens
                or any(output.new_token_ids for output in outputs.outputs),
            )
            if stats.kv_connector_stats:
                self._apply_counts(stats.kv_connector_stats)
        return outputs

    def _apply_counts(self, counts: dict[str, Any]) -> None:
        """counts: the counters of the connector's halves, of one step."""
        self._metrics.apply(counts)
        if (tracer := self._context.tracer) is not None:
            record_notes(tracer, counts.get(SPAN, ()))
        if self._link_tests is not None:
            self._link_tests.resolve(counts.get(PREFLIGHT, ()))

    def _fingerprinted(self, described: EngineMetadata, lease_ttl_s: float) -> EngineMetadata:
        """Adds the fingerprint; the engine's process has only set its layout."""
        layout = described.fingerprint[KV_LAYOUT]
        made = fingerprint(self.config, layout, max_model_len=self._core.loaded_len)
        # A decode engine waits for the last write of a lost writer by its own time-to-live.
        made["lease_ttl_s"] = f"{lease_ttl_s:g}"
        return msgspec.structs.replace(described, fingerprint=made)

    def _unfinished(self) -> list[str]:
        """The engine's names of the requests that still run."""
        return []

    async def _close(self) -> None:
        if self._link_tests is not None:
            self._link_tests.close()
        if self._context.kept is None:
            self._client = None
            await self._core.close()
        else:
            # The engine goes on without what the drain has not finished.
            with contextlib.suppress(EngineDeadError):
                await self._abort(self._unfinished())
            self._client = None
        with contextlib.suppress(FileNotFoundError):
            self._context.engine_config_path.unlink()
