"""`dynamo-lite sidecar`: runs a sidecar until it is stopped, and returns an exit code."""

import logging
import logging.config

import uvloop

from dynamo_lite.forward.sidecar_options import SidecarConfig
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.runtime.process.stop import EXIT_FORCED, EXIT_STOPPED
from dynamo_lite.runtime.tasks import first_of
from dynamo_lite.serve.supervisor import StopSignals
from dynamo_lite.services.sidecar import Sidecar

logger = logging.getLogger(__name__)


def run(config: SidecarConfig, *, grace_s: float, level: str, log_format: LogFormat) -> int:
    """Raises StartupError, ConfigError. Exit code 0 after a drain, 130 after a second signal."""
    logging.config.dictConfig(logging_config(log_format, "sidecar", 0, level=level))
    return uvloop.run(_run(config, grace_s))


async def _run(config: SidecarConfig, grace_s: float) -> int:
    signals, sidecar = StopSignals(), Sidecar(config)
    with signals.installed():
        try:
            urls = await sidecar.start()
            print("ready", *urls, flush=True)
            await signals.stop.wait()
            logger.info("draining: no new connections, open answers have %g s", grace_s)
            await first_of(sidecar.drain(grace_s), signals.force.wait())
            return EXIT_FORCED if signals.force.is_set() else EXIT_STOPPED
        finally:
            await sidecar.close()
