"""Whether a worker's engine works: it is asked once a second, and the worker's heartbeats report
the result.

An engine that does not answer may be stopped, stuck, or only late. Its worker is unhealthy until
the first answer. An engine without an answer or a step for long has failed: the worker ends, and is
restarted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_lite.disagg.engine import Engine
from dynamo_lite.protocol.errors import DynamoLiteError, EngineDied
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.runtime.members.health import HealthVerdict, publish_heartbeats
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.serve.services.metrics import GaugeTable, status_gauges

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
#: Timeout of one question; the next one follows at once.
_ANSWER_S = 2.0
_RETRY_S = 0.2
#: A longer round of `run` shows that this process itself was held up.
_ROUND_S = _ANSWER_S + _PERIOD_S + 0.5
#: After this time without an answer the engine is unhealthy, and after this time it has failed.
_SILENT_S, _DEAD_S = 2.5, 30.0
#: With work, and this time without a step, it is unhealthy, too.
_STALLED_S = 30.0
#: Step timeout until the engine has produced a token: a step may compile kernels.
_FIRST_TOKEN_S = 900.0


class EngineProbe:
    """busy: whether the engine has requests of this worker. step_timeout_s: an engine that has work
    has failed after this time without a step. gauges: of the engine's status, if it has one.

    `run` raises EngineDied. It must end before the engine is closed.
    """

    def __init__(
        self,
        host: Host,
        engine: Engine,
        *,
        busy: Callable[[], bool],
        step_timeout_s: float,
        gauges: GaugeTable = (),
    ):
        self._host, self._engine = host, engine
        self._messaging, self._now = host.messaging, host.clock.monotonic
        self._busy, self._step_timeout_s = busy, step_timeout_s
        self._show = status_gauges(host.registry, gauges if engine.metadata else ())
        self._unanswered_since: float | None = None
        self._stepped_at = self._now()
        self._load = engine.load
        #: The engine's last answer, and when it was asked.
        self.status: EngineStatus | None = None
        self.asked_at = 0.0

    def start(self, probing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts heartbeats with the verdict, and returns their task. probing: runs `run`, and ends
        with the host's stack."""
        host = self._host
        heartbeats = publish_heartbeats(
            host.messaging,
            namespace=host.spec.namespace,
            component=host.spec.component,
            lease_id=host.lease.id,
            verdict=self.verdict,
        )
        host.stack.push_async_callback(end_tasks, host.spawn(probing, "engine-probe"))
        return host.spawn(heartbeats, "health-beat")

    async def run(self) -> None:
        with self._messaging.watch_connection(self._on_connection):
            while True:
                began = self._now()
                answered = not self._engine.metadata or await self._ask_status()
                await asyncio.sleep(_PERIOD_S if answered else _RETRY_S)
                self._discount(self._now() - began - _ROUND_S)
                if trouble := self.dead():
                    raise EngineDied(trouble)

    def verdict(self) -> HealthVerdict:
        """The health for heartbeats. Must be called about once a second, because it also notes
        when the engine has nothing to do."""
        self._note_steps()
        silent, stalled = self._silent_s(), self._stalled_s()
        if silent > _SILENT_S:
            return False, f"the engine has not answered for {silent:.1f} s"
        if stalled > _STALLED_S:
            return False, f"the engine has work, but made no step for {stalled:.0f} s"
        return True, ""

    def dead(self) -> str:
        """Why the engine has failed; empty while it may recover."""
        self._note_steps()
        if self._silent_s() > _DEAD_S:
            return f"the engine's process has not answered for {_DEAD_S:g} s"
        if self._stalled_s() > (limit_s := self._stuck_s()):
            return f"the engine has work, but made no step for {limit_s:g} s"
        return ""

    def facts(self) -> dict[str, Any]:
        """For /health, /live and /ready."""
        works, trouble = self.verdict()
        todo = f"{trouble}; unhealthy until it does" if trouble else ""
        return {
            "ok": works,
            "trouble": trouble,
            "dead": self.dead(),
            "checks": {"engine": todo},
        }

    async def _ask_status(self) -> bool:
        asked = self._now()
        if self._unanswered_since is None:
            self._unanswered_since = asked
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await self._engine.describe()
        except (DynamoLiteError, TimeoutError) as exc:
            # An outage of NATS has a line of its own.
            if self._messaging.connected:
                logger.warning("no status from the engine: %s", exc or "no answer")
            return False
        self._unanswered_since, self.status, self.asked_at = None, status, asked
        if status.last_step_age_s is not None:
            self._stepped_at = max(self._stepped_at, asked - status.last_step_age_s)
        self._show(status)
        return True

    def _discount(self, held_up_s: float) -> None:
        if held_up_s > 0:
            self._stepped_at += held_up_s
            if self._unanswered_since is not None:
                self._unanswered_since += held_up_s

    def _on_connection(self, connected: bool) -> None:
        """While we are disconnected no answer can arrive."""
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
