"""Checks before any process starts: ports, servers, models, the planner's budget, vLLM's arguments,
the Rust edge. And what must be there by then: the demo model, a shared port.

A failed check raises StartupError, or ConfigError for a file or a URL that the user has named.
Nothing has been started by then.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.planner.policy.limits import contradictions
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import is_loopback, parse_etcd_url, parse_nats_url, redact
from dynamo_lite.runtime.listening import bind
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig, accepted_keys
from dynamo_lite.serve.document import Document, unknown_key
from dynamo_lite.serve.graphs import packaged_file
from dynamo_lite.serve.processes import output_of
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.services import PLANNER
from dynamo_lite.vllm.args import UNKNOWN_KEY, Mistake
from dynamo_lite.vllm.compat import require_tested, vllm_version
from dynamo_lite.vllm.edge_choice import obstacles

_VLLM_TIMEOUT_S = 180.0

#: In Hugging Face's format, in Mistral's.
_MODEL_FILES = ("config.json", "params.json")
_DEMO_MODEL = ".dynamo-lite/models/tiny"
_DEMO_MODEL_TIMEOUT_S = 300.0


def hold_port(service: ServiceConfig, stack: contextlib.ExitStack) -> ServiceConfig:
    """Raises StartupError unless the service's HTTP server can listen, if it has one. What else a
    process opens, it reports itself before it loads anything.

    The port of several processes is kept: until the stack is closed, only they can listen on it,
    with SO_REUSEPORT. The result has the real port in place of 0.
    """
    host, port = service.options.get("host"), service.options.get("port")
    if not service.workers or host is None or port is None:
        return service
    try:
        # It never listens, so it gets no connections.
        holder = bind(host, port)
    except StartupError as exc:
        name = service.service.name
        how = f"choose another: --{name}.port=... or --{name}.host=..."
        raise StartupError(f"{name}.port: {exc}; {how}") from exc
    if service.workers == 1:
        holder.close()
        return service
    stack.enter_context(holder)
    # Only now: with SO_REUSEPORT before, two graphs could bind the same port and would get each
    # other's connections. And with SO_REUSEADDR any program could bind it, because this socket
    # does not listen.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return replace(service, options={**service.options, "port": holder.getsockname()[1]})


def check_model(service: ServiceConfig) -> None:
    """Raises StartupError when `model` is a path without a model, but for the demo model, which
    is made."""
    model = service.flags.get("model", "")
    if not model.startswith((".", "/", "~")) or model == _DEMO_MODEL:
        return
    if not any(Path(model, name).is_file() for name in _MODEL_FILES):
        files = " or ".join(_MODEL_FILES)
        raise StartupError(f"{service.service.name}.model: no model ({files}) at {model}")


def make_demo_model(services: Sequence[ServiceConfig]) -> None:
    """Makes the tiny model of the packaged configurations if one of these services asks for it and
    it is not there.

    It takes some seconds, because transformers and torch are imported, in a process of its own.
    Nothing is downloaded. Raises StartupError.
    """
    wanted = any(service.flags.get("model") == _DEMO_MODEL for service in services)
    if not wanted or (Path(_DEMO_MODEL) / "config.json").is_file():
        return
    script = packaged_file("scripts", "tiny_model.py")
    if script is None:
        raise StartupError(f"no model at {_DEMO_MODEL}, and no scripts/tiny_model.py to make it")
    print(f"making the demo model in {_DEMO_MODEL}", file=sys.stderr)
    command = (sys.executable, str(script), _DEMO_MODEL)
    failed, env = "the demo model could not be made", child_environment({})
    asyncio.run(output_of(failed, command, env, b"", _DEMO_MODEL_TIMEOUT_S))


def check_planner(config: GraphConfig, document: Document) -> None:
    """Adds to the document's mistakes what contradicts itself in the planner's options."""
    planner = config.get(PLANNER.name)
    # Without options after a mistake in its section.
    if planner is not None and planner.options:
        for mistake in contradictions(msgspec.convert(planner.options, PlannerConfig)):
            document.complain((PLANNER.name,), mistake)


def check_vllm_arguments(
    config: GraphConfig, document: Document, *, allow_untested: bool = False
) -> None:
    """Adds what vLLM's own parsers refuse to the document's mistakes. They run in a process of
    their own, because importing them takes seconds. allow_untested: also of a vLLM that was not
    tried.

    Raises StartupError when vLLM is not installed or was not tried, or its parsers fail.
    """
    services = {c.service.name: c for c in config.services if c.service.flags != "none"}
    if not services:
        return
    require_tested(vllm_version(), allow_untested=allow_untested)
    sections = {name: {"kind": c.service.flags, "args": c.flags} for name, c in services.items()}
    for mistake in _ask_vllm(json.dumps(sections, default=str)):
        key, message, service = mistake["key"], mistake["message"], mistake["section"]
        if message == UNKNOWN_KEY:
            # It may be a misspelt one of the service's own.
            accepted = accepted_keys(services[service].service)
            message = unknown_key(key, accepted, mistake["nearest"])
            message += ", and vLLM's own arguments (`vllm serve --help=all`)"
        document.complain((service, key), message)


def _ask_vllm(question: str) -> list[Mistake]:
    """Raises StartupError. An interrupt ends the parsers, too."""
    failed, env = "vLLM's argument parser failed", child_environment({})
    command = (sys.executable, "-m", "dynamo_lite.vllm.args")
    asked = output_of(failed, command, env, question.encode(), _VLLM_TIMEOUT_S)
    return json.loads(asyncio.run(asked))["mistakes"]


def check_edge(config: GraphConfig, document: Document) -> None:
    """Adds to the document's mistakes what a Frontend that starts here with `edge: rust` cannot
    serve."""
    for c in config.here:
        if not c.workers or c.options.get("edge") != "rust":
            continue
        found = obstacles(
            c.options,
            asdict(FrontendConfig()),
            c.flags,
            workers=c.workers,
            key_in_environment=bool(child_environment(c.env).get("VLLM_API_KEY")),
        )
        for obstacle in found:
            path = (c.service.name, *obstacle.key.split("."))
            document.complain(path, f"not with `edge: rust`: {obstacle.reason}")


def check_bind_host(bind_host: str, namespace: str, option: str, certificates: str) -> None:
    """Raises ConfigError if processes of other hosts would reach those that listen there: without
    certificates they must not. option, certificates: what names the host, and their folder."""
    if not is_loopback(bind_host):
        raise ConfigError(
            [
                f"{option}: {bind_host} is reachable from other hosts, so processes that"
                " listen there need certificates: make them (dynamo-lite access certs DIR"
                f" --namespace {namespace}) and name their folder, {certificates}"
            ]
        )


def check_urls(nats_url: str | None, etcd_url: str | None) -> None:
    """Raises ConfigError for malformed URLs and certificate files that they name, and for a server
    of another host that is reached without TLS."""
    for option, url, parse, scheme in (
        ("--nats-url", nats_url, parse_nats_url, "tls"),
        ("--etcd-url", etcd_url, parse_etcd_url, "https"),
    ):
        if url is None or (address := parse(url)).on_loopback or address.tls is not None:
            continue
        why = f"{redact(url)} is another host, which is reached over TLS only"
        how = f"write {scheme}://, and name its authority: Graph.certificates, or ?ca=FILE"
        raise ConfigError([f"{option}: {why}: {how}"])
