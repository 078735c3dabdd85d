"""What can be checked before any process starts: ports, servers, models.

Each failure is one clear StartupError; nothing has to be undone.
"""

import asyncio
import json
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dynamo_lite.components.services import Service
from dynamo_lite.engine.vllm.args import UNKNOWN_KEY, Mistake, vllm_version
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import host_port, parse_etcd_url, redact
from dynamo_lite.serve.config import (
    GraphConfig,
    ServiceConfig,
    accepted_keys,
    child_environment,
)
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.fields import unknown_key
from dynamo_lite.serve.processes import can_listen, death_signal_hook, signal_group
from dynamo_lite.serve.run_state import write_private

_REACH_TIMEOUT_S = 3.0
_VLLM_TIMEOUT_S = 180.0
_VERDICTS_KEPT = 16


def check_port(service: ServiceConfig) -> None:
    """Raises StartupError when the service's HTTP port cannot be listened on."""
    host, port = service.options.get("host"), service.options.get("port")
    if not isinstance(host, str) or not isinstance(port, int) or service.workers == 0:
        return
    try:
        free = can_listen(host, port)
    except OSError as exc:
        raise StartupError(f"cannot listen on {host_port(host, port)}: {exc.strerror}") from exc
    if not free:
        name = service.service.name
        raise StartupError(f"port {port} on {host} is taken; choose another: --{name}.port=PORT")


def check_model(service: ServiceConfig) -> None:
    """Raises StartupError when `model` is a path and no model lies there."""
    model = service.flags.get("model", "")
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "/", "~"))
    if looks_like_path and not (path / "config.json").is_file():
        hint = "; `make setup` makes the tiny model" if path.name == "tiny" else ""
        raise StartupError(f"{service.service.name}.model: no model at {path}{hint}")


def check_url_syntax(nats_url: str | None, etcd_url: str | None) -> None:
    """Raises ConfigError."""
    mistakes: list[str] = []
    for url in nats_url.split(",") if nats_url else ():
        try:
            parts = urlsplit(url.strip())
            good = parts.scheme in ("nats", "tls") and bool(parts.hostname)
            _ = parts.port
        except ValueError:
            good = False
        if not good:
            mistakes.append(f"--nats-url {redact(url)}: expected nats://HOST:PORT")
    if etcd_url:
        try:
            parse_etcd_url(etcd_url)
        except ConfigError as exc:
            mistakes += exc.mistakes
    if mistakes:
        raise ConfigError(mistakes)


async def check_reachable(what: str, urls: str, default_port: int) -> None:
    """Raises StartupError unless one of the comma-separated servers accepts a connection."""
    problems: list[str] = []
    for url in urls.split(","):
        parts = urlsplit(url.strip())
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or default_port
                )
        except TimeoutError:
            problems.append(f"no answer within {_REACH_TIMEOUT_S:g} s")
        except OSError as exc:
            problems.append(exc.strerror or str(exc))
        else:
            writer.close()
            return
    raise StartupError(f"{what} at {redact(urls)} is unreachable: {'; '.join(problems)}")


def check_vllm_arguments(config: GraphConfig, document: Document, cache: Path) -> None:
    """Lets vLLM's own parsers judge all arguments that are theirs.

    Importing them takes seconds, so verdicts are remembered in the file `cache`.
    Mistakes go to the document. Raises StartupError without vLLM.
    """
    sections = {
        c.service.name: {"kind": c.service.flags, "args": c.flags}
        for c in config.services
        if c.service.flags != "none"
    }
    if not sections:
        return
    version = vllm_version()
    if not version:
        raise StartupError("vLLM is not installed; run `make setup`")
    question = json.dumps(sections, default=str)
    key = sha256(f"{version}\n{question}".encode()).hexdigest()
    verdicts = _read_verdicts(cache)
    if key not in verdicts:
        verdicts[key] = _ask_vllm(question)
        kept = dict(list(verdicts.items())[-_VERDICTS_KEPT:])
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_private(cache, msgspec.json.encode(kept))
    services = {c.service.name: c.service for c in config.services}
    for mistake in verdicts[key]:
        section, name = mistake["section"], mistake["key"]
        document.complain((section, name), _verdict(services[section], mistake))


def _verdict(service: Service, mistake: Mistake) -> str:
    """vLLM knows its own keys alone: an unknown one may be a slip in one of ours."""
    if mistake["message"] != UNKNOWN_KEY:
        return mistake["message"]
    theirs = [key for key in mistake["nearest"] if key not in service.reserved]
    message = unknown_key(mistake["key"], accepted_keys(service), theirs)
    return f"{message}, and vLLM's own arguments (`vllm serve --help=all`)"


def _read_verdicts(cache: Path) -> dict[str, list[Mistake]]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, list[Mistake]])
    except (OSError, msgspec.DecodeError):
        return {}


def _ask_vllm(question: str) -> list[Mistake]:
    """Raises StartupError."""
    try:
        answer = _run_parsers(question)
        return msgspec.json.decode(answer, type=dict[str, list[Mistake]])["mistakes"]
    except (subprocess.TimeoutExpired, msgspec.DecodeError, KeyError) as exc:
        raise StartupError(f"vLLM's argument parser gave no verdict: {exc}") from exc


def _run_parsers(question: str) -> str:
    """What vLLM's parsers say. Raises StartupError and TimeoutExpired; an interrupt
    ends them, too."""
    with subprocess.Popen(
        [sys.executable, "-m", "dynamo_lite.engine.vllm.args"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment({}),
        # Ctrl-C in a terminal is for this process, which then ends the parsers.
        start_new_session=True,
        preexec_fn=death_signal_hook(signal.SIGKILL),
    ) as parsers:
        try:
            answer, errors = parsers.communicate(question, timeout=_VLLM_TIMEOUT_S)
        except BaseException:
            signal_group(parsers.pid, signal.SIGKILL)
            raise
    if parsers.returncode != 0:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise StartupError(f"vLLM's argument parser failed: {last[0]}")
    return answer
