"""Settles which HTTP edge the Frontend runs: `edge: python | rust | auto`."""

from dataclasses import asdict, replace
from pathlib import Path

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.services.config import FrontendConfig, VllmWorkerConfig
from dynamo_lite.vllm.args import vllm_version
from dynamo_lite.vllm.edge_choice import (
    Obstacle,
    check_version,
    configured_limits,
    find_program,
    obstacles,
    unknown_parsers,
)

_VARIABLE = "DYNAMO_LITE_VLLM_RS"
_GET = "run scripts/get_vllm_rs, and set edge-binary to the path that it prints"


def settle_edge(
    config: GraphConfig, document: Document, *, only: str | None = None
) -> tuple[GraphConfig, str]:
    """Returns the configuration with `edge: python` or `edge: rust` and the path of the program,
    and a note: why `auto` takes Python, or what `edge: rust` answers otherwise; "" for neither.

    What keeps `edge: rust` from serving is added to the document's mistakes. only: the service
    that is started alone; without a Frontend there is nothing to settle.
    """
    for service in config.services:
        here = service.workers > 0 and only in (None, service.service.name)
        if (
            service.service.config is FrontendConfig
            and here
            and service.options["edge"] != "python"
        ):
            settled, note = _settle(service, document, _other_answers(config))
            services = (settled if one is service else one for one in config.services)
            return replace(config, services=tuple(services)), note
    return config, ""


def _settle(
    service: ServiceConfig, document: Document, other_answers: list[Obstacle]
) -> tuple[ServiceConfig, str]:
    """other_answers: obstacles to `edge: auto`; where `edge: rust` is asked for, they are told."""
    name, auto = service.service.name, service.options["edge"] == "auto"
    found = obstacles(
        service.options,
        asdict(FrontendConfig()),
        service.flags,
        workers=service.workers,
        key_in_environment=any(child_environment(env).get("VLLM_API_KEY") for env in service.env),
    )
    if auto:
        found += other_answers
    program = None
    if not found:
        try:
            program = _program(service)
            found += unknown_parsers(program, service.flags)
        except StartupError as exc:
            found.append(Obstacle("edge", str(exc)))
    if program is not None and not found:
        told = [] if auto else [f"{name}.edge: rust: {o.key}: {o.reason}" for o in other_answers]
        options = {**service.options, "edge": "rust", "edge_binary": str(program)}
        return replace(service, options=options), "\n".join(told)
    if auto:
        key, reason = found[0].key, found[0].reason
        options = {**service.options, "edge": "python"}
        note = f"{name}.edge: auto takes Python: {key}: {reason}"
        return replace(service, options=options), note
    for obstacle in found:
        how = "" if obstacle.key == "edge" else "not with `edge: rust`: "
        document.complain((name, *obstacle.key.split(".")), f"{how}{obstacle.reason}")
    return service, ""


def _other_answers(config: GraphConfig) -> list[Obstacle]:
    """What the Rust frontend serves, but with other answers or traces, or to strangers."""
    found = [
        Obstacle(f"{service.service.name}.{limit.key}", limit.reason)
        for service in config.services
        if service.service.config in (FrontendConfig, VllmWorkerConfig)
        for limit in configured_limits(service.options, asdict(service.service.config()))
    ]
    found += [
        Obstacle(
            f"{service.service.name}.host",
            f"clients of {service.options['host']} could send vllm-rs a chat template of their own"
            " that takes its CPU time and memory",
        )
        for service in config.services
        if service.service.config is FrontendConfig and not is_loopback(service.options["host"])
    ]
    if config.shared.tracing is not None:
        found.append(Obstacle("Graph.otlp-endpoint", "a client's traceparent is not continued"))
    return found


def _program(service: ServiceConfig) -> Path:
    """Raises StartupError."""
    given = service.options["edge_binary"] or child_environment({}).get(_VARIABLE) or None
    program = find_program(given)
    if program is None:
        raise StartupError(f"vllm-rs is not installed beside vLLM: {_GET}")
    check_version(program, vllm_version())
    return program
