"""Whether a worker's engine works: it is asked once a second, and the worker's heartbeats report
the result.

An engine that does not answer may be stopped, stuck, or only late. Its worker is unhealthy until
the first answer. An engine without an answer or a step for long has failed: the worker ends, and is
restarted.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prometheus_client import Gauge

from dynamo_lite.disagg.engine import Engine
from dynamo_lite.protocol.errors import DynamoLiteError, EngineDied
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.runtime.members.health import HealthVerdict, publish_heartbeats
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.serve.services.metrics import GaugeTable

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
        self._unanswered_since: float | None = None
        self._stepped_at = self._now()
        self._load = engine.load
        #: The engine's last answer, and when it was asked.
        self.status: EngineStatus | None = None
        self.asked_at = 0.0
        for name, text, field in gauges if engine.metadata else ():
            Gauge(name, text, registry=host.registry).set_function(partial(self._value, field))

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
                held_up_s = max(self._now() - began - _ROUND_S, 0.0)
                self._stepped_at += held_up_s
                if self._unanswered_since is not None:
                    self._unanswered_since += held_up_s
                if trouble := self.dead():
                    raise EngineDied(trouble)

    def verdict(self) -> HealthVerdict:
        """The health for heartbeats. Must be called about once a second, because it also notes
        when the engine has nothing to do."""
        trouble = self._trouble(_SILENT_S, _STALLED_S)
        return not trouble, trouble

    def dead(self) -> str:
        """Why the engine has failed; empty while it may recover."""
        warm = self._engine.load.gave_tokens
        return self._trouble(
            _DEAD_S, self._step_timeout_s if warm else max(self._step_timeout_s, _FIRST_TOKEN_S)
        )

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
        return True

    def _value(self, field: str) -> float:
        """Of a gauge."""
        value = None if self.status is None else getattr(self.status, field)
        return math.nan if value is None else value

    def _on_connection(self, connected: bool) -> None:
        """While we are disconnected no answer can arrive."""
        if self._unanswered_since is not None:
            self._unanswered_since = self._now()

    def _trouble(self, silent_s: float, stalled_s: float) -> str:
        """What the engine has not done for longer than this."""
        now, since = self._now(), self._unanswered_since
        if self._load is not self._engine.load or not self._busy():
            self._load, self._stepped_at = self._engine.load, now
        if since is not None and self._messaging.connected and now - since > silent_s:
            return f"the engine has not answered for {now - since:.1f} s"
        if now - self._stepped_at > stalled_s:
            return f"the engine has work, but made no step for {now - self._stepped_at:.0f} s"
        return ""
