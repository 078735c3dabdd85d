"""Runs `dynamo-lite join`: one process beside one stock engine, without a supervisor."""

import asyncio
import logging.config
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.runtime.process.component import ProcessSpec, Report
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.runtime.process.stop import (
    EXIT_LEASE_EXPIRED,
    EXIT_START_FAILED,
    EXIT_STOPPED,
    StopRequest,
    stop_on_signals,
)
from dynamo_lite.serve.progress import Progress
from dynamo_lite.services.joined_engine import COMPONENTS, JoinedEngine, JoinOptions

_BACKOFF = Backoff(longest_s=5.0)


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """The arguments of one `dynamo-lite join`."""

    options: JoinOptions
    namespace: str
    etcd_url: str
    state_dir: Path
    bind_host: str
    lease_ttl_s: float
    grace_s: float
    log_level: str = "INFO"
    log_format: LogFormat = "text"


def run(request: JoinRequest) -> int:
    """Returns the exit code."""
    component = COMPONENTS[request.options.role]
    logging.config.dictConfig(
        logging_config(request.log_format, component, 0, level=request.log_level)
    )
    spec = ProcessSpec(
        namespace=request.namespace,
        component=component,
        instance=0,
        nats_url="",
        etcd_url=request.etcd_url,
        state_dir=str(request.state_dir),
        bind_host=request.bind_host,
        lease_ttl_s=request.lease_ttl_s,
        grace_s=request.grace_s,
    )
    return uvloop.run(_join(spec, request.options))


async def _join(spec: ProcessSpec, options: JoinOptions) -> int:
    """If the lease expired while etcd was out of reach, a new lease is granted: no other
    process would register the engine again."""
    report = _reporter(Progress())
    # A closed terminal ends it in order, too.
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, signal.raise_signal, signal.SIGTERM)
    expired, failures = False, 0
    while True:
        began = asyncio.get_running_loop().time()
        code = await run_process(spec, JoinedEngine(asdict(options), spec), report)
        expired = expired or code == EXIT_LEASE_EXPIRED
        if not expired or code not in (EXIT_LEASE_EXPIRED, EXIT_START_FAILED):
            return code
        uptime_s = asyncio.get_running_loop().time() - began
        restart = _BACKOFF.after_exit(failures, uptime_s)
        failures = restart.failures
        if await _stopped(restart.delay_s):
            return EXIT_STOPPED


async def _stopped(within_s: float) -> bool:
    """Returns whether a stop signal came within this time."""
    stop = StopRequest()
    with stop_on_signals(stop):
        try:
            async with asyncio.timeout(within_s):
                await stop.wait()
        except TimeoutError:
            return False
    return True


def _reporter(progress: Progress) -> Report:
    def report(line: dict[str, Any]) -> None:
        match line:
            case {"state": "starting", "detail": detail}:
                progress.line("join", detail)
            case {"state": "ready"}:
                print(
                    f"joined {line['engine']} model={line['model'] or 'unknown'}"
                    f" lease={line['lease']} status={line['status_url']}",
                    flush=True,
                )
            case {"state": "draining", "reason": reason}:
                progress.line("join", f"draining: {reason}")
            case {"state": "failed", "error": error}:
                progress.line("join", f"error: {error}")
            case _:
                progress.line("join", str(line["state"]))

    return report
