"""Resolves the user's document and a graph into the configuration of every process.

All mistakes are collected and reported together, each with its origin.

A section holds a service's own options (its dataclass) and, for services that run vLLM,
vLLM's arguments. `common-configs: [key, ...]` copies keys from the section `Common`; a key
of the service itself overrides a common one.
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.options import NaturalOption, PortOption, SecondsOption
from dynamo_lite.runtime.tracing import TracingOptions, check_endpoint
from dynamo_lite.serve.child_environment import DEVICES
from dynamo_lite.serve.document import Document, field_keys, fill, kebab, unknown_key
from dynamo_lite.serve.services.services import EVERY_SERVICE, ROUTER, Graph, Service

#: Sections and keys that are not a service or its options.
_SHARED_SECTIONS = ("Graph", "Common")
_SERVICE_KEYS = ("ServiceArgs", "common-configs")

#: Options or vLLM arguments that must have one value in all services that have them. What else a
#: prefill worker's KV depends on is compared when the engines run (`vllm/engine/fingerprint.py`).
_MUST_AGREE = ("queue", "model")


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Section `Graph`: options of all processes of a graph, as docs/configuration.md explains."""

    namespace: str = "dynamo"
    bind_host: str = "127.0.0.1"
    certificates: str | None = None
    lease_ttl_s: Annotated[float, msgspec.Meta(ge=2, le=1e9)] = 30.0
    grace_s: SecondsOption = 30.0
    devices: tuple[int | str, ...] | NaturalOption = 0
    otlp_endpoint: str | None = None
    trace_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    @property
    def tracing(self) -> TracingOptions | None:
        if self.otlp_endpoint is None:
            return None
        return TracingOptions(endpoint=self.otlp_endpoint, ratio=self.trace_ratio)

    @property
    def certificate_folder(self) -> Path | None:
        """Links are not resolved: Kubernetes replaces a mounted Secret by changing their target."""
        given = self.certificates
        return None if given is None else Path(given).expanduser().absolute()

    @property
    def device_names(self) -> tuple[str, ...]:
        given = self.devices
        return tuple(map(str, range(given) if isinstance(given, int) else given))


@dataclass(frozen=True, kw_only=True)
class ServiceArgs:
    """Section `Service.ServiceArgs`: how a service's processes are started."""

    workers: NaturalOption = 1
    status_port: PortOption = 0
    devices: NaturalOption = 0
    env: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ServiceArgs):
    service: Service
    #: Environment variables.
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    #: The service's own options in snake_case, with defaults.
    options: dict[str, Any]
    #: vLLM's arguments in kebab-case, only those given.
    flags: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    shared: GraphOptions
    #: In drain order.
    services: tuple[ServiceConfig, ...]
    #: The one service to start; None: the whole graph.
    only: str | None = None

    def get(self, name: str) -> ServiceConfig | None:
        return next((c for c in self.services if c.service.name == name), None)

    @property
    def here(self) -> list[ServiceConfig]:
        """The services that this command starts processes for, in drain order."""
        return [c for c in self.services if self.only in (None, c.service.name)]

    @property
    def devices(self) -> tuple[str, ...]:
        """Of this host, in the order in which its processes get them. A service that starts alone
        has its own share and what lies behind all shares: the others may start on this host, too,
        and know nothing of each other. A list too short for the whole graph is for it alone; it
        begins behind the shares of those before it."""
        names = self.shared.device_names
        if self.only is None:
            return names
        before = itertools.takewhile(lambda c: c.service.name != self.only, self.services)
        first, every = _occupied(before), _occupied(self.services)
        if every > len(names):
            return names[first:] + names[:first]
        return names[first : first + _occupied(self.here)] + names[every:]


def _occupied(services: Iterable[ServiceConfig]) -> int:
    """The devices of all their processes."""
    return sum(c.workers * c.devices for c in services)


def resolve(graph: Graph, document: Document, *, only: str | None = None) -> GraphConfig:
    """Applies the document to the graph.

    Mistakes are added to the document: call its `raise_mistakes` before starting anything.

    only: the service to start alone.
    """
    _check_sections(document, graph)
    startable = [service.name for service in graph.services]
    if only is not None and only not in startable:
        accepted = ", ".join(startable)
        document.mistakes.append(f"--service-name {only}: unknown service; accepted: {accepted}")
    shared = _shared_options(document)
    common, used = document.section("Common"), set[str]()
    services: list[ServiceConfig] = []
    for service in graph.services:
        section = document.section(service.name)
        taken = _from_common(document, service.name, section, common)
        used |= taken.keys()
        services.append(_resolve_service(service, document, section, taken))
    for key in map(str, common):
        if key not in used:
            document.complain(("Common", key), "no service lists this key in its common-configs")
    config = GraphConfig(shared=shared, services=tuple(services), only=only)
    _check_agreement(document, services)
    if only is None:
        # One that starts alone may be meant for others than those of the file.
        _check_router(document, config)
    return config


def describe(config: GraphConfig) -> dict[str, Any]:
    """The resolved configuration in the form of the YAML file."""
    described: dict[str, Any] = {"Graph": _kebab_keys(asdict(config.shared))}
    for c in config.services:
        args = {kebab(field.name): getattr(c, field.name) for field in fields(ServiceArgs)}
        described[c.service.name] = {**_kebab_keys(c.options), **c.flags, "ServiceArgs": args}
    return described


def accepted_keys(service: Service) -> list[str]:
    """The keys of a service's section, without vLLM's arguments."""
    return [*field_keys(service.config), *_SERVICE_KEYS]


def _shared_options(document: Document) -> GraphOptions:
    given = document.section("Graph")
    options = fill(document, ("Graph",), GraphOptions, given) or GraphOptions()
    if not names.is_namespace(options.namespace):
        message = "a namespace has at most 63 lower-case letters, digits and dashes"
        document.complain(("Graph", "namespace"), f"{message}; got {options.namespace!r}")
    endpoint = options.otlp_endpoint
    if endpoint is not None and (wrong := check_endpoint(endpoint)) is not None:
        document.complain(("Graph", "otlp-endpoint"), wrong)
    return options


def _resolve_service(
    service: Service, document: Document, section: dict[str, Any], common: dict[str, Any]
) -> ServiceConfig:
    """common: the keys of `Common` that it takes."""
    path, own = (service.name,), field_keys(service.config)
    content = common | {key: value for key, value in section.items() if key not in _SERVICE_KEYS}
    options, flags = content, dict[str, Any]()
    if service.flags != "none":
        # Only vLLM's parsers can check its arguments.
        flags = {str(key): value for key, value in content.items() if key not in own}
        options = {key: value for key, value in content.items() if key in own}
        if isinstance(model := flags.get("model"), str):
            flags["model"] = os.path.expanduser(model)  # vLLM does not
        else:
            document.complain((*path, "model"), "expected the path or the name of a model")
    accepted = accepted_keys(service)
    filled = fill(document, path, service.config, options, service.defaults, accepted)
    given, path = document.section(service.name, "ServiceArgs"), (service.name, "ServiceArgs")
    args = fill(document, path, ServiceArgs, given) or ServiceArgs()
    if args.devices and DEVICES in args.env:
        why = f"Graph.devices sets {DEVICES}; remove it from ServiceArgs.env"
        document.complain((*path, "devices"), why)
    options = {} if filled is None else asdict(filled)
    env = {name: str(value) for name, value in args.env.items()}
    started: dict[str, Any] = vars(args) | {"env": env}
    return ServiceConfig(service=service, options=options, flags=flags, **started)


def _from_common(
    document: Document, name: str, section: dict[str, Any], common: dict[str, Any]
) -> dict[str, Any]:
    listed, where = section.get("common-configs", []), (name, "common-configs")
    if not isinstance(listed, list):
        document.complain(where, f"expected a list of keys of Common, got {listed!r}")
        return {}
    taken: dict[str, Any] = {}
    for key in listed:
        if isinstance(key, str) and key in common:
            taken[key] = common[key]
            document.origins.setdefault((name, key), document.where(("Common", key)))
        else:
            document.complain(where, f"{key}: {unknown_key(str(key), common)}")
    return taken


def _check_sections(document: Document, graph: Graph) -> None:
    accepted = [*_SHARED_SECTIONS, *(service.name for service in graph.services)]
    for section in map(str, document.tree):
        if section not in accepted:
            message = unknown_key(section, accepted).replace("key", "section", 1)
            if section in [service.name for service in EVERY_SERVICE]:
                message = (
                    f"this graph has no {section}: choose another graph, or remove the section"
                )
            # An override of one of its keys may have made it.
            written = next(where for path, where in document.origins.items() if path[0] == section)
            document.origins.setdefault((section,), written)
            document.complain((section,), message)


def _check_router(document: Document, config: GraphConfig) -> None:
    """Without its Router a Frontend takes the workers in turn."""
    for c in config.services:
        if c.options.get("router") == "component" and config.get(ROUTER.name) is None:
            why = "this graph has no Router: choose kv, or a graph with one (graphs.disagg_router)"
            document.complain((c.service.name, "router"), why)


def _check_agreement(document: Document, services: Sequence[ServiceConfig]) -> None:
    for key in _MUST_AGREE:
        values = {
            c.service.name: c.flags.get(key, _kebab_keys(c.options.get(key)))
            for c in services
            if key in c.flags or key in c.options
        }
        if len({repr(value) for value in values.values()}) > 1:
            found = "; ".join(f"{name} has {value!r}" for name, value in values.items())
            document.complain((next(iter(values)), key), f"must have the same value: {found}")


def _kebab_keys(options: Any) -> Any:
    if isinstance(options, dict):
        return {kebab(str(key)): _kebab_keys(value) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return [_kebab_keys(value) for value in options]
    return options
