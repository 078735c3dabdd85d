"""A sidecar: a server beside one stock decode engine, without etcd and NATS."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from prometheus_client import CollectorRegistry

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.client import Answer, error
from dynamo_lite.forward.engines import KnownEngine, trust
from dynamo_lite.forward.failures import Final
from dynamo_lite.forward.headers import PREFILLER_HEADER
from dynamo_lite.forward.http import ForwardServer, reply
from dynamo_lite.forward.metrics import ForwardMetrics
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig, parse_host_port
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.process.stop import EXIT_STOPPED, StopRequest, stop_on_signals

logger = logging.getLogger(__name__)

#: Loopback and private networks, also those of carriers, which some clusters use for their pods.
#: Not link-local addresses: clouds serve credentials there.
PRIVATE = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7", "localhost"),
)
#: Servers of clouds that hand out credentials, in networks that are private otherwise. Only an
#: entry for the address itself allows one.
METADATA = frozenset(
    ip_address(text) for text in ("100.100.100.200", "fd00:ec2::254", "fd20:ce::254")
)
#: Most prefill engines that one request may name, and that are known at a time.
MAX_NAMED, MAX_PREFILLERS = 64, 256
#: How long a prefill engine is checked after a client has named it.
_NAMED_S = 60.0


class AllowedHosts:
    """Addresses, networks and names. Raises ValueError for one that is none of these."""

    def __init__(self, entries: Sequence[str]):
        self.entries = tuple(entry.strip().lower() for entry in entries)
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in self.entries:
            try:
                self._networks.append(ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                if not entry or any(char in entry for char in "/:@ *"):
                    raise ValueError(
                        f"--allow-prefiller: {entry!r} is no address, network (CIDR) or host name"
                    ) from None
                self._names.add(entry)

    def __contains__(self, host: str) -> bool:
        """A name is not resolved: the list must contain the same name."""
        address = _address(host)
        if address is None:
            return host.lower() in self._names
        if address in METADATA and ip_network(address) not in self._networks:
            return False
        return any(address in network for network in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """An IPv4 address inside an IPv6 address counts as the IPv4 address."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


#: Prefill legs that contain the decode engine's own address.
_NEED_HOST = ("moriio-read", "moriio-write")
_ANY_PREFILLER = EngineOptions(url="http://localhost:1", role="prefill")


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """A server beside one decode engine. `forwarder` has that engine, and the server's options."""

    forwarder: ForwarderConfig
    #: What all prefill engines that headers name have in common; the URL's host and port are any.
    prefillers: EngineOptions = _ANY_PREFILLER
    #: Hosts that headers may name.
    allowed: tuple[str, ...] = PRIVATE
    #: Port of the sidecar's own metrics, on the same address; 0: none.
    metrics_port: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        AllowedHosts(self.allowed)
        protocol = self.forwarder.protocol
        if protocol in _NEED_HOST and self.forwarder.engines[0].transfer_host is None:
            raise ValueError(
                f"protocol {protocol} tells prefill engines where the decode engine is: give"
                " --transfer-host, this host's address as they see it"
            )


class NamedPrefillers:
    """The prefill engines that clients name, of those hosts that are allowed."""

    def __init__(self, parts: ForwardParts, config: SidecarConfig):
        self._parts, self._config = parts, config
        self._allowed = AllowedHosts(config.allowed)
        self._refusals = LogLimit()
        #: By HOST:PORT; the one that was named longest ago is the first.
        self._known: OrderedDict[str, KnownEngine] = OrderedDict()

    async def find(self, names: Sequence[str]) -> list[KnownEngine]:
        """Raises Final."""
        found = dict.fromkeys(map(self._accepted, names))
        if len(found) > MAX_NAMED:
            text = f"{PREFILLER_HEADER}: at most {MAX_NAMED} engines"
            raise Final(error(400, "BadRequestError", text))
        return list(await asyncio.gather(*map(self._engine, found)))

    def _accepted(self, name: str) -> str:
        """The name as HOST:PORT. Raises Final."""
        try:
            host, port = parse_host_port(name)
        except ValueError as exc:
            text = f"{PREFILLER_HEADER}: expected HOST:PORT, got {name[:100]!r}"
            raise Final(error(400, "BadRequestError", text)) from exc
        if host not in self._allowed:
            text = (
                f"{PREFILLER_HEADER}: {host} is not accepted. Accepted are"
                f" {', '.join(self._allowed.entries)} (the sidecar's --allow-prefiller)"
            )
            self._refusals.log(logger, "%s", text)
            raise Final(error(403, "PermissionDeniedError", text))
        return host_port(host, port)

    async def _engine(self, name: str) -> KnownEngine:
        engine = self._known.get(name)
        if engine is None or engine.left:
            engine = self._add(name)
        self._known.move_to_end(name)
        engine.named_until = asyncio.get_running_loop().time() + _NAMED_S
        if self._parts.protocol.query_path:
            await engine.checked.wait()
        return engine

    def _add(self, name: str) -> KnownEngine:
        """It counts as healthy until a leg or a check fails, unless its ids have to be known."""
        engines, common = self._parts.engines, self._config.prefillers
        url = f"{'https' if common.secure else 'http'}://{name}"
        engine = self._known[name] = engines.add(replace(common, url=url))
        if len(self._known) > MAX_PREFILLERS:
            engines.remove(self._known.popitem(last=False)[1])
        if not self._parts.protocol.query_path:
            engine.passed()
        engines.follow(engine)
        return engine


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncIterator[ForwardServer]:
    """Gives the server of a sidecar that runs while the context lasts. Raises StartupError,
    ConfigError."""
    own = config.forwarder
    if config.prefillers.secure:
        trust(config.prefillers.ca_file)  # a mistake in it ends the start
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        parts = ForwardParts(own, by_load=False)
        parts.named = NamedPrefillers(parts, config).find
        await enter(parts)
        if config.metrics_port:
            registry = CollectorRegistry()
            registry.register(ForwardMetrics(parts.stats, parts.placer, parts.engines))
            await enter(StatusServer(parts.facts, registry, own.host, config.metrics_port))
        ready = partial(_ready, parts.engines.all[0])
        # `/metrics` is the engine's.
        own_paths = {"/health": ready, "/ready": ready, "/live": lambda: reply({"ok": True})}
        yield await enter(ForwardServer(parts, own_paths))


async def serve(config: SidecarConfig, grace_s: float) -> int:
    """Returns 0 when it was stopped and has drained. Raises StartupError, ConfigError."""
    stop = StopRequest()
    with stop_on_signals(stop):
        async with sidecar(config) as server:
            print("ready", server.url, flush=True)
            await stop.wait()
            logger.info("draining: no new connections, open answers have %g s", grace_s)
            await server.stop(grace_s)
    return EXIT_STOPPED


def _ready(engine: KnownEngine) -> Answer:
    trouble = "" if engine.usable else f"{engine.name}: {engine.trouble}"
    check = {"ok": engine.usable, "detail": trouble}
    return reply({"ok": engine.usable, "checks": {"engine": check}})
