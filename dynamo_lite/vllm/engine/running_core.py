"""vLLM's engine process, seen from its component: what a switchable worker keeps over its roles."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from dynamo_lite.disagg.engine_config import EngineConfig, write_engine_config
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    NoResponders,
    StartupError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import ChangeRole, decode_role_reply
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents, followed
from dynamo_lite.vllm.engine.supported import refusal_reported
from dynamo_lite.vllm.first_token import FirstTokenRules

logger = logging.getLogger(__name__)

_ASK_S, _PAUSE_S = 1.0, 0.02
#: While NATS is away, of which each question logs a warning.
_AWAY_PAUSE_S = 1.0
#: Beside two times-to-live of a lease, after which the blocks of a lost writer are free.
_MARGIN_S = 10.0


class RunningCore:
    """One engine. All calls come from one event loop.

    args: flags of `vllm serve`. on_kv_drop: counts dropped events of the engine's prefix cache;
    None: they are not followed.
    """

    def __init__(self, args: list[str], on_kv_drop: OnDrop | None = None):
        self._args, self._on_kv_drop = args, on_kv_drop
        #: What follows the engine's prefix cache; None before the start, and if nothing does.
        self.kv_events: VllmKvEvents | None = None
        #: vLLM's client; None before the start and after the end.
        self.client: Any = None
        #: Of its present role; None for an engine without remote prefills.
        self.engine_config: EngineConfig | None = None
        self.rules: FirstTokenRules | None = None
        #: The model's length when it was loaded.
        self.loaded_len: int | None = None
        #: How long the last change of the role took.
        self.change_s: float | None = None
        self._config: VllmConfig | None = None
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="engine-start")

    @property
    def config(self) -> VllmConfig:
        assert self._config is not None
        return self._config

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Loading takes many seconds, and the event loop must keep running."""
        return await asyncio.get_running_loop().run_in_executor(self._starter, work)

    async def start(self, engine_config: EngineConfig | None, file: Path) -> None:
        """Starts the engine's process. file: for `engine_config`. Raises StartupError."""
        if engine_config is not None:
            write_engine_config(file, engine_config)
        self.engine_config = engine_config
        self.client = await self.in_thread(lambda: self._load(engine_config, file))

    async def change_role(
        self,
        new: EngineConfig,
        file: Path,
        messaging: Messaging,
        *,
        margin_s: float = _MARGIN_S,
    ) -> None:
        """The running engine becomes that of another role, with another id. file: for `new`.
        margin_s: how much longer than two of the lease's times-to-live it may take.

        Raises StartupError when the engine does not, or has ended.
        """
        old = self.engine_config
        assert old is not None
        began = time.monotonic()
        write_engine_config(file, new)
        order = encode_sealed(ChangeRole(engine_id=new.engine_id, config_file=file.name))
        subject = names.role_subject(old.namespace, old.engine_id)
        described = names.describe_subject(new.namespace, new.engine_id)
        limit_s, refused = 2 * new.lease_ttl_s + margin_s, "it does not answer"
        try:
            async with asyncio.timeout(limit_s):
                while not await self._answers(messaging, described):
                    reply = await _asked(messaging, subject, order)
                    if reply is not None:
                        refused = decode_role_reply(reply).refused or refused
                    await self.wake()
                    await asyncio.sleep(_PAUSE_S)
        except EngineDeadError as exc:
            raise StartupError("the engine's process has ended while it changed its role") from exc
        except TimeoutError as exc:
            raise StartupError(
                f"the engine did not change its role within {limit_s:g} s: {refused}"
            ) from exc
        self.engine_config, self.change_s = new, time.monotonic() - began

    async def wake(self) -> None:
        """Any call makes an idle engine core check for steps to make. Raises EngineDeadError."""
        await self.client.is_sleeping_async()

    async def close(self) -> None:
        if self.client is not None:
            client, self.client = self.client, None
            await self.in_thread(client.shutdown)
        self._starter.shutdown(wait=False)

    def _load(self, engine_config: EngineConfig | None, file: Path) -> Any:
        on_drop = self._on_kv_drop
        self._config = config = vllm_config(
            self._args, engine_config, file, kv_events=on_drop is not None
        )
        self.kv_events = None if on_drop is None else followed(config, on_drop)
        self.loaded_len = config.model_config.max_model_len
        self.rules = FirstTokenRules(config)
        with refusal_reported(file):
            return EngineCoreClient.make_async_mp_client(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=True,
            )

    async def _answers(self, messaging: Messaging, subject: str) -> bool:
        return bool(await _asked(messaging, subject, b""))


async def _asked(messaging: Messaging, subject: str, payload: bytes) -> bytes | None:
    """None: the engine does not serve the subject now."""
    try:
        return await messaging.request(subject, payload, timeout_s=_ASK_S)
    except (NoResponders, DeadlineExceeded):
        return None
    except Unavailable as exc:
        logger.warning("the engine could not be asked: %s", exc)
        await asyncio.sleep(_AWAY_PAUSE_S)
        return None
