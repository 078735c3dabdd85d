"""`dynamo-lite sidecar`: runs a sidecar until it is stopped, and returns an exit code."""

import asyncio
import logging
import logging.config
import signal

import uvloop

from dynamo_lite.forward.sidecar_options import SidecarConfig
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.runtime.process.stop import EXIT_FORCED, EXIT_STOPPED, StopRequest, stop_on_signals
from dynamo_lite.runtime.tasks import first_of
from dynamo_lite.services.sidecar import Sidecar

logger = logging.getLogger(__name__)


def run(config: SidecarConfig, *, grace_s: float, level: str, log_format: LogFormat) -> int:
    """Raises StartupError, ConfigError. Exit code 0 after a drain, 130 after a second signal."""
    logging.config.dictConfig(logging_config(log_format, "sidecar", 0, level=level))
    return uvloop.run(_run(config, grace_s))


async def _run(config: SidecarConfig, grace_s: float) -> int:
    stop, force, sidecar = StopRequest(), asyncio.Event(), Sidecar(config)
    with stop_on_signals(stop, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), again=force.set):
        try:
            urls = await sidecar.start()
            print("ready", *urls, flush=True)
            await stop.wait()
            logger.info("draining: no new connections, open answers have %g s", grace_s)
            await first_of(sidecar.drain(grace_s), force.wait())
            return EXIT_FORCED if force.is_set() else EXIT_STOPPED
        finally:
            await sidecar.close()
