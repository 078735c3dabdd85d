"""Checks before any process starts: ports, servers, models, the planner's budget, the Rust edge;
vLLM's arguments are checked in `vllm_arguments.py`. And what must be there by then: the demo model,
a shared port.

A failed check raises StartupError, or ConfigError for a file or a URL that the user has named.
Nothing has been started by then.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from dynamo_lite.disagg.queue.base import QueueOptions, single_server_text
from dynamo_lite.planner.config import KubernetesOptions, PlannerConfig
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import contradictions, occupied
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.runtime.address import (
    host_port,
    is_loopback,
    parse_etcd_url,
    parse_nats_url,
    redact,
)
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.kubernetes import KubernetesApi
from dynamo_lite.serve.access import ServersToCheck
from dynamo_lite.serve.child_environment import DEVICES, child_environment
from dynamo_lite.serve.config import GraphConfig, ServiceConfig
from dynamo_lite.serve.document import Document
from dynamo_lite.serve.graphs import packaged_file
from dynamo_lite.serve.processes import answer_of, can_listen, output_of
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.services import PLANNER
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import (
    Obstacle,
    check_version,
    find_program,
    obstacles,
    unknown_parsers,
)

_ACCESS_TIMEOUT_S = 60.0

#: In Hugging Face's format, in Mistral's.
_MODEL_FILES = ("config.json", "params.json")
_DEMO_MODEL = ".dynamo-lite/models/tiny"
_DEMO_MODEL_TIMEOUT_S = 300.0
_EDGE_VARIABLE = "DYNAMO_LITE_VLLM_RS"
_GET_EDGE = "run scripts/get_vllm_rs, and set edge-binary to the path that it prints"
_RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


def check_addresses(config: GraphConfig) -> None:
    """Raises StartupError when a process that starts here cannot listen."""
    bind_host = config.shared.bind_host
    # The option of the host, the host, the port and its option.
    wanted = [("Graph.bind-host", bind_host, 0, "")]
    for service in config.here:
        name, first = service.service.name, service.status_port
        if service.workers and (address := http_address(service)) is not None:
            wanted.append((f"{name}.host", *address, f"{name}.port"))
        for number in range(service.workers if first else 0):
            option = f"{name}.ServiceArgs.status-port"
            wanted.append(("Graph.bind-host", bind_host, first + number, option))
    found = dict[tuple[str, int], str]()
    for host_option, host, port, option in wanted:
        try:
            free = can_listen(host, port)
        except OSError as exc:
            why = f"{host_option}: cannot listen on {host}: {exc.strerror}"
            raise StartupError(why) from exc
        other = found.get((host, port), "") if port else ""
        if other or not free:
            why = f"that of {other}, too" if other else "in use"
            raise StartupError(f"port {port} on {host} is {why}; choose another: --{option}=PORT")
        found[host, port] = option


def http_address(service: ServiceConfig) -> tuple[str, int] | None:
    """Host and port of the service's HTTP server; None if it has none."""
    host, port = service.options.get("host"), service.options.get("port")
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


@contextlib.contextmanager
def shared_port(service: ServiceConfig) -> Iterator[ServiceConfig]:
    """Keeps the HTTP port of a service with several processes: while the context is open, only they
    can listen on it, with SO_REUSEPORT.

    The result has the real port in place of 0. Raises StartupError when the port is in use.
    """
    if (address := http_address(service)) is None or service.workers < 2:
        yield service
        return
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    # It never listens, so it gets no connections.
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(address)
            # Only now: with SO_REUSEPORT before, two graphs could bind the same port and would
            # get each other's connections. And with SO_REUSEADDR any program could bind it,
            # because this socket does not listen.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError as exc:
            why = f"cannot reserve {host_port(*address)} for several processes: {exc.strerror}"
            raise StartupError(why) from exc
        yield replace(service, options={**service.options, "port": holder.getsockname()[1]})


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


def check_service_account(service: ServiceConfig) -> None:
    """Raises ConfigError when the service is to use Kubernetes, and has no usable account there."""
    options = KubernetesOptions(**service.options.get("kubernetes", {}))
    if not options.workloads or service.workers == 0:
        return
    try:
        KubernetesApi(options.url, Path(options.service_account))
    except ConfigError as exc:
        raise ConfigError(
            [f"{service.service.name}.{mistake}" for mistake in exc.mistakes]
        ) from exc


def check_planner_budget(config: GraphConfig, document: Document) -> None:
    """Adds to the document's mistakes what is beyond the budget of a planner that starts here.

    A planner of Kubernetes knows the devices of its workers by its own section, and the graph does
    not start them.
    """
    planner = next((c for c in config.here if c.service.name == PLANNER.name and c.workers), None)
    # Without options after a mistake in its section.
    if planner is None or not planner.options:
        return
    options = msgspec.convert(planner.options, PlannerConfig)
    where = (PLANNER.name, "budget-devices")
    kubernetes = options.kubernetes
    workers = [one for name in Role if (one := config.get(name)) and not kubernetes.workloads]
    devices = {c.service.name: c.devices for c in workers} or kubernetes.devices
    for mistake in contradictions(options, devices):
        document.complain(where, mistake)
    started = [c for c in workers if c.workers and c in config.here]
    need = sum(c.workers * occupied(c.devices) for c in started)
    if need > options.budget_devices:
        each = ", ".join(f"{c.service.name} {c.workers} * {occupied(c.devices)}" for c in started)
        document.complain(
            where,
            f"{options.budget_devices}, but the workers that the graph starts need {need} devices:"
            f" {each} (a worker without a device counts as one); raise the budget, or start fewer"
            " workers (ServiceArgs.workers)",
        )


def shared_gpu(config: GraphConfig, version: str) -> str:
    """A line about engines that open the same GPUs; "" if there are none. version: of vLLM."""
    engines = [c for c in config.here if c.service.flags == "engine" and not c.devices]
    count = sum(c.workers for c in engines if DEVICES not in c.env)
    if count < 2 or not version.startswith("vllm "):  # the CUDA build
        return ""
    return (
        f"{count} engines open the same GPUs, as they have no ServiceArgs.devices; to give each its"
        " own, set these and Graph.devices"
    )


def check_stored_responses(config: GraphConfig, document: Document) -> None:
    """Adds several Frontends that store responses to the document's mistakes."""
    for service in config.here:
        if service.service.config is not FrontendConfig or service.workers < 2:
            continue
        if child_environment(service.env).get(_RESPONSES_STORE, "0") != "0":
            why = f"stored responses ({_RESPONSES_STORE}) are in one process's memory: start one"
            document.complain((service.service.name, "ServiceArgs", "workers"), why)


def settle_edge(config: GraphConfig, document: Document) -> GraphConfig:
    """Returns the configuration with the path of the program where `edge: rust` is asked for.

    What keeps it from serving is added to the document's mistakes.
    """
    here = [one for one in config.here if one.workers]
    settled = (_settle_edge(one, document) if one in here else one for one in config.services)
    return replace(config, services=tuple(settled))


def _settle_edge(service: ServiceConfig, document: Document) -> ServiceConfig:
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
            program = _edge_program(service)
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


def _edge_program(service: ServiceConfig) -> Path:
    """Raises StartupError."""
    given = service.options["edge_binary"] or child_environment({}).get(_EDGE_VARIABLE) or None
    program = find_program(given)
    if program is None:
        raise StartupError(f"vllm-rs is not installed beside vLLM: {_GET_EDGE}")
    check_version(program, vllm_version())
    return program


def check_certificates(
    folder: Path | None,
    namespace: str,
    components: Iterable[str],
    bind_host: str,
    option: str = "Graph.bind-host",
) -> None:
    """Raises ConfigError, with a line for each bad file, unless the components' certificates can be
    used; without a folder, if processes of other hosts would reach these components.

    bind_host: where they listen. option: the name of that.
    """
    if folder is None:
        if not is_loopback(bind_host):
            named = "--certificates" if option.startswith("--") else "Graph.certificates"
            raise ConfigError(
                [
                    f"{option}: {bind_host} is reachable from other hosts, so processes that"
                    " listen there need certificates: make them (dynamo-lite access certs DIR"
                    f" --namespace {namespace}) and name their folder, {named}"
                ]
            )
        return
    mistakes: list[str] = []
    for component in components:
        try:
            Certificates(folder, namespace, component)
        except ConfigError as exc:
            mistakes += exc.mistakes
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))


def queue_options(services: Iterable[ServiceConfig]) -> QueueOptions | None:
    """The queue of these services; None if none of them has one."""
    found = (c.options["queue"] for c in services if "queue" in c.options)
    return next((QueueOptions(**options) for options in found), None)


def check_urls(nats_url: str | None, etcd_url: str | None, *, certified: bool = True) -> None:
    """Raises ConfigError for malformed URLs and certificate files that they name, for a server of
    another host that is reached without TLS, and for a NATS that would have to let in everybody.
    certified: whether clients show a certificate of the graph."""
    mistakes: list[str] = []
    for option, url, parse, scheme in (
        ("--nats-url", nats_url, parse_nats_url, "tls"),
        ("--etcd-url", etcd_url, parse_etcd_url, "https"),
    ):
        if url is None:
            continue
        try:
            address = parse(url)
        except ConfigError as exc:
            mistakes += exc.mistakes
            continue
        if address.on_loopback:
            continue
        if address.tls is None:
            mistakes.append(
                f"{option}: {redact(url)} is another host, which is reached over TLS only: write"
                f" {scheme}://, and name its authority: Graph.certificates, or ?ca=FILE"
            )
        known = address.user or address.token or address.creds or address.nkey
        if option == "--nats-url" and not (known or certified or address.has_certificate):
            mistakes.append(
                f"{option}: {redact(url)} has no credentials, so that NATS would let in everybody:"
                " give it users (dynamo-lite access nats), and write ?login=FILE behind the host"
            )
    if mistakes:
        raise ConfigError(mistakes)


async def check_servers(servers: ServersToCheck) -> None:
    """Raises StartupError unless the servers are reachable and accept the credentials, the queue
    exists or can be created, and new processes can work with those that run in the namespace."""
    queue = servers.queue
    if servers.nats is None and queue is not None and queue.replicas > 1:
        raise StartupError(single_server_text(queue.replicas))
    if servers.nats is None and servers.etcd is None:
        return
    failed, asked = "the check of NATS and etcd failed", msgspec.json.encode(servers)
    problems = await answer_of(failed, "serve.access", asked, list[str], _ACCESS_TIMEOUT_S)
    if problems:
        raise StartupError("; ".join(problems))
