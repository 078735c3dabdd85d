"""Checks that the Rust frontend can serve where `edge: rust` is asked for."""

from dataclasses import asdict, replace
from pathlib import Path

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.child_environment import child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import (
    Obstacle,
    check_version,
    find_program,
    obstacles,
    unknown_parsers,
)

_VARIABLE = "DYNAMO_LITE_VLLM_RS"
_GET = "run scripts/get_vllm_rs, and set edge-binary to the path that it prints"


def settle_edge(config: GraphConfig, document: Document) -> GraphConfig:
    """Returns the configuration with the path of the program where `edge: rust` is asked for.

    What keeps it from serving is added to the document's mistakes.
    """
    here = [one for one in config.here if one.workers]
    settled = (_settle(one, document) if one in here else one for one in config.services)
    return replace(config, services=tuple(settled))


def _settle(service: ServiceConfig, document: Document) -> ServiceConfig:
    if service.service.config is not FrontendConfig or service.options["edge"] != "rust":
        return service
    found = obstacles(
        service.options,
        asdict(FrontendConfig()),
        service.flags,
        workers=service.workers,
        key_in_environment=bool(child_environment(service.env).get("VLLM_API_KEY")),
    )
    program = None
    if not found:
        try:
            program = _program(service)
            found += unknown_parsers(program, service.flags)
        except StartupError as exc:
            found.append(Obstacle("edge", str(exc)))
    for obstacle in found:
        how = "" if obstacle.key == "edge" else "not with `edge: rust`: "
        path = (service.service.name, *obstacle.key.split("."))
        document.complain(path, f"{how}{obstacle.reason}")
    if found:
        return service
    return replace(service, options={**service.options, "edge_binary": str(program)})


def _program(service: ServiceConfig) -> Path:
    """Raises StartupError."""
    given = service.options["edge_binary"] or child_environment({}).get(_VARIABLE) or None
    program = find_program(given)
    if program is None:
        raise StartupError(f"vllm-rs is not installed beside vLLM: {_GET}")
    check_version(program, vllm_version())
    return program
