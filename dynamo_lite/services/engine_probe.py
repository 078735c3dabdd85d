"""Whether a worker's engine works: asked once a second, told in the worker's beats.

An engine that does not answer may be stopped, stuck, or only late; it is out of
rotation meanwhile, and back with its first answer. One that is silent or without
a step for long is given up: the worker ends, and is started anew.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from dynamo_lite.engine.base import EngineLoad
from dynamo_lite.protocol.errors import DynamoLiteError, EngineDied
from dynamo_lite.protocol.prefill import EngineStatus
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.members.heartbeat import Verdict
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
#: One question; the next is asked right after it.
_ANSWER_S = 2.0
_RETRY_S = 0.2
#: A round of `run` that takes longer shows that this process was held up itself.
_ROUND_S = _ANSWER_S + _PERIOD_S + 0.5
#: Unanswered for so long, the engine is out of rotation; for so long, given up.
_SILENT_S, _DEAD_S = 2.5, 30.0
#: With work, but without a step for so long, it is out of rotation as well.
_STALLED_S = 30.0
#: Until the engine has given a token, a step may compile kernels: it is given this long.
_FIRST_TOKEN_S = 900.0

#: What a worker says of its health before its engine is there.
NOT_LOADED: Mapping[str, Any] = MappingProxyType(
    {"ok": False, "checks": {"model": "not loaded yet: wait"}}
)


class Described(Protocol):
    """The part of an engine that is looked at."""

    @property
    def load(self) -> EngineLoad:
        """A new object after each step that the component heard of."""
        ...

    @property
    def metadata(self) -> EngineMetadata | None: ...

    async def describe(self) -> EngineStatus: ...


class EngineProbe:
    """busy: whether the engine has work of ours. step_timeout_s: without a step for so long,
    though it has work, it is given up. on_status: takes what it says of itself.

    `run` is to be owned by the process; it raises EngineDied.
    """

    def __init__(
        self,
        engine: Described,
        messaging: Messaging,
        clock: Clock,
        *,
        busy: Callable[[], bool],
        step_timeout_s: float,
        on_status: Callable[[EngineStatus], None] = lambda status: None,
    ):
        self._engine, self._messaging, self._now = engine, messaging, clock.monotonic
        self._busy, self._on_status = busy, on_status
        self._step_timeout_s = step_timeout_s
        self._unanswered_since: float | None = None
        self._stepped_at = self._now()
        self._load = engine.load
        self.closing = False

    async def run(self) -> None:
        """Ends when an engine that is being closed (`closing`) does not answer."""
        with self._messaging.watch_connection(self._on_connection):
            while not self.closing:
                began = self._now()
                answered = self._engine.metadata is None or await self._ask()
                await asyncio.sleep(_PERIOD_S if answered else _RETRY_S)
                self._forgive(self._now() - began - _ROUND_S)
                if not self.closing and (trouble := self.dead()):
                    raise EngineDied(trouble)

    def verdict(self) -> Verdict:
        """For the beats, about once a second: it also notes when there is nothing to do."""
        self._note_steps()
        silent, stalled = self._silent_s(), self._stalled_s()
        if silent > _SILENT_S:
            return False, f"the engine has not answered for {silent:.1f} s"
        if stalled > _STALLED_S:
            return False, f"the engine has work, but made no step for {stalled:.0f} s"
        return True, ""

    def dead(self) -> str:
        """Why the engine is given up; empty while it may come back."""
        self._note_steps()
        if self._silent_s() > _DEAD_S:
            return f"the engine's process has not answered for {_DEAD_S:g} s"
        if self._stalled_s() > (limit_s := self._stuck_s()):
            return f"the engine has work, but made no step for {limit_s:g} s"
        return ""

    def facts(self) -> dict[str, Any]:
        """For /health, /live and /ready."""
        works, trouble = self.verdict()
        todo = f"{trouble}; it gets no work until it does" if trouble else ""
        return {
            "ok": works,
            "trouble": trouble,
            "dead": self.dead(),
            "checks": {"model": "", "engine": todo},
        }

    async def _ask(self) -> bool:
        asked = self._now()
        if self._unanswered_since is None:
            self._unanswered_since = asked
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await self._engine.describe()
        except (DynamoLiteError, TimeoutError) as exc:
            if not self.closing:
                logger.warning("the engine did not describe itself: %s", exc or "no answer")
            return False
        self._unanswered_since = None
        if status.last_step_age_s is not None:
            self._stepped_at = max(self._stepped_at, asked - status.last_step_age_s)
        self._on_status(status)
        return True

    def _forgive(self, held_up_s: float) -> None:
        if held_up_s > 0:
            self._stepped_at += held_up_s
            if self._unanswered_since is not None:
                self._unanswered_since += held_up_s

    def _on_connection(self, connected: bool) -> None:
        """Nobody hears an answer while we are disconnected."""
        if self._unanswered_since is not None:
            self._unanswered_since = self._now()

    def _note_steps(self) -> None:
        if self._load is not self._engine.load or not self._busy():
            self._load, self._stepped_at = self._engine.load, self._now()

    def _silent_s(self) -> float:
        since = self._unanswered_since
        return 0.0 if since is None or not self._messaging.connected else self._now() - since

    def _stalled_s(self) -> float:
        return self._now() - self._stepped_at

    def _stuck_s(self) -> float:
        warm = self._engine.load.gave_tokens
        return self._step_timeout_s if warm else max(self._step_timeout_s, _FIRST_TOKEN_S)
