"""Checks before any process starts: ports, servers, models; vLLM's arguments are checked in
`vllm_arguments.py`.

A failed check raises StartupError, or ConfigError for a file or a URL that the user has named.
Nothing has been started by then.
"""

import asyncio
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.queue.base import QueueOptions, single_server_text
from dynamo_lite.runtime.address import (
    ServerAddress,
    host_port,
    parse_etcd_url,
    parse_nats_url,
    redact,
)
from dynamo_lite.runtime.kubernetes import KubernetesApi
from dynamo_lite.runtime.process.death_signal import death_signal_hook
from dynamo_lite.runtime.tls import server_context
from dynamo_lite.serve.access import ServersToCheck
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.options import GraphOptions
from dynamo_lite.serve.ports import http_address
from dynamo_lite.serve.processes import can_listen, signal_group
from dynamo_lite.services.config import KubernetesOptions
from dynamo_lite.vllm.http_options import tls_options

_REACH_TIMEOUT_S = 3.0
_ACCESS_TIMEOUT_S = 60.0


def check_port(service: ServiceConfig) -> None:
    """Raises StartupError when the service cannot listen on its HTTP port."""
    if (address := http_address(service)) is None or service.workers == 0:
        return
    host, port = address
    try:
        free = can_listen(host, port)
    except OSError as exc:
        raise StartupError(f"cannot listen on {host_port(host, port)}: {exc.strerror}") from exc
    if not free:
        name = service.service.name
        raise StartupError(f"port {port} on {host} is in use; choose another: --{name}.port=PORT")


def check_model(service: ServiceConfig) -> None:
    """Raises StartupError when `model` is a path without a model."""
    model = service.flags.get("model", "")
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "/", "~"))
    if looks_like_path and not (path / "config.json").is_file():
        raise StartupError(f"{service.service.name}.model: no model (config.json) at {path}")


def check_tls(service: ServiceConfig) -> None:
    """Raises StartupError when the HTTP server's certificate cannot be loaded."""
    if (tls := tls_options(service.flags)) is not None:
        tls.context()


def check_service_account(service: ServiceConfig) -> None:
    """Raises ConfigError when the service is to use Kubernetes, and has no usable account there."""
    if service.options.get("connector") != "kubernetes" or service.workers == 0:
        return
    options = KubernetesOptions(**service.options["kubernetes"])
    try:
        KubernetesApi(options.url, Path(options.service_account), options.timeout_s)
    except ConfigError as exc:
        name = service.service.name
        raise ConfigError([f"{name}.{mistake}" for mistake in exc.mistakes]) from exc


def check_status_tls(options: GraphOptions) -> None:
    """Raises ConfigError unless both of the status servers' files are named, and are a pair, or
    neither."""
    cert, key = options.status_tls_cert, options.status_tls_key
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise ConfigError(["Graph: status-tls-cert and status-tls-key go together; name both"])
    try:
        server_context(Path(cert), Path(key))
    except ConfigError as exc:
        raise ConfigError([f"Graph: status server: {mistake}" for mistake in exc.mistakes]) from exc


def queue_options(services: Iterable[ServiceConfig]) -> QueueOptions | None:
    """The queue of these services; None if none of them has one."""
    found = (c.options["queue"] for c in services if "queue" in c.options)
    return next((QueueOptions(**options) for options in found), None)


def check_url_syntax(nats_url: str | None, etcd_url: str | None) -> None:
    """Raises ConfigError for malformed URLs and for certificate files that they name."""
    mistakes: list[str] = []
    for url, parse in ((nats_url, parse_nats_url), (etcd_url, parse_etcd_url)):
        if url is None:
            continue
        try:
            parse(url)
        except ConfigError as exc:
            mistakes += exc.mistakes
    if mistakes:
        raise ConfigError(mistakes)


def readable_by_others(nats_url: str | None, etcd_url: str | None) -> list[str]:
    """A warning for each server of another host that is reached without TLS. The URLs are well
    formed."""
    said = {
        "NATS": (nats_url, parse_nats_url, "prompts"),
        "etcd": (etcd_url, parse_etcd_url, "the addresses and metadata of all processes"),
    }
    return [
        f"warning: {what} at {redact(url)} is reached without TLS: who can read the network can"
        f" read {contents}"
        for what, (url, parse, contents) in said.items()
        if url is not None and (address := parse(url)).tls is None and not address.on_loopback
    ]


async def check_servers(
    nats_url: str | None,
    etcd_url: str | None,
    namespace: str,
    *,
    authenticated: bool,
    queue: QueueOptions | None,
) -> None:
    """Raises StartupError unless the servers are reachable and accept the credentials, the queue
    exists or can be created, and new processes can work with those that run in the namespace.

    authenticated: whether the processes to be started have a secret. queue: see `queue_options`.
    """
    if nats_url is None and queue is not None and queue.replicas > 1:
        raise StartupError(single_server_text(queue.replicas))
    if nats_url is not None:
        await _check_reachable("NATS", nats_url, parse_nats_url(nats_url))
    if etcd_url is not None:
        await _check_reachable("etcd", etcd_url, parse_etcd_url(etcd_url))
    if nats_url is not None or etcd_url is not None:
        servers = ServersToCheck(
            nats=nats_url,
            etcd=etcd_url,
            namespace=namespace,
            authenticated=authenticated,
            queue=queue,
        )
        await _check_access(servers)


async def _check_reachable(what: str, url: str, address: ServerAddress) -> None:
    """Raises StartupError unless one of the servers accepts a connection."""
    problems: list[str] = []
    for host, port in address.hosts:
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except TimeoutError:
            problems.append(f"connect timeout after {_REACH_TIMEOUT_S:g} s")
        except OSError as exc:
            problems.append(exc.strerror or str(exc))
        else:
            writer.close()
            return
    raise StartupError(f"{what} at {redact(url)} is unreachable: {'; '.join(problems)}")


async def _check_access(servers: ServersToCheck) -> None:
    """Raises StartupError when TLS or the credentials fail, or a server refuses."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo_lite.serve.access"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment({}),
        start_new_session=True,
        preexec_fn=death_signal_hook(signal.SIGKILL),
    )
    errors = b""
    try:
        async with asyncio.timeout(_ACCESS_TIMEOUT_S):
            answer, errors = await process.communicate(msgspec.json.encode(servers))
        problems = msgspec.json.decode(answer, type=list[str])
    except (TimeoutError, msgspec.DecodeError) as exc:
        reason = f"timeout after {_ACCESS_TIMEOUT_S:g} s"
        if process.returncode is not None:
            reason = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise StartupError(f"the check of NATS and etcd failed: {redact(reason)}") from exc
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
            await process.wait()
    if problems:
        raise StartupError("; ".join(problems))
