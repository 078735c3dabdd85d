"""What is known of one stock engine: its state, and whether it may take a leg."""

import asyncio
import logging
import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.forward.protocols.base import ForwardProtocol, Peer
from dynamo_lite.protocol.kv import Load
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.tls import TlsFiles

logger = logging.getLogger(__name__)

#: Failed checks after which an engine that answers late or with an error is unhealthy. An engine
#: that refuses connections is unhealthy at once.
FAILURES = 2
#: An engine or an answer of it that has said nothing for this long is silent.
SILENCE_S = 10.0
#: Gets why the engine has ended, and whether it refuses connections.
OnEnd = Callable[[str, bool], None]


@dataclass(slots=True, eq=False)
class KnownEngine:
    """One engine. Its number is never used for another engine of this process."""

    number: int
    options: EngineOptions
    protocol: ForwardProtocol
    #: Lease of the process that has registered it, hexadecimal; empty: it is in the configuration.
    lease: str = ""
    #: The model named in its record, for engines that do not report it.
    model: str = ""
    #: Its record is gone: it gets no new leg.
    left: bool = False
    healthy: bool = False
    #: Why it is not healthy or not used.
    trouble: str = "not checked yet"
    failures: int = 0
    #: Set after its first check, or when it has left.
    checked: asyncio.Event = field(default_factory=asyncio.Event)
    #: When its server has last said anything, in the loop's time; 0: never.
    heard_at: float = 0.0
    #: Called when it is found to have ended: it refuses connections, has fallen silent, or another
    #: process is at its address.
    on_end: set[OnEnd] = field(default_factory=set[OnEnd])
    #: Until when it is known, in the loop's time, unless a client names it again.
    named_until: float = math.inf
    #: Model names that it serves; empty: it did not report them.
    models: tuple[str, ...] = ()
    #: Why it gets no prefill legs: its answer was not of this protocol. It stays so until a check
    #: fails, as when the engine is started with other options.
    misfit: str = ""
    #: Whether its answers come from several data-parallel ranks, each with an identity.
    varies: bool = False
    #: What protocols know of it.
    peer: Peer = field(init=False)
    #: HOST:PORT.
    name: str = field(init=False)
    address: tuple[str, int] = field(init=False)
    #: How its certificate is checked; None: it speaks plain HTTP.
    tls: ssl.SSLContext | None = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.options.address
        self.name = host_port(*self.address)
        self.tls = trust(self.options.ca_file) if self.options.secure else None
        host, port = self.options.transfer_address(self.protocol.name)
        notify_port = self.options.notify_port or 0
        self.peer = Peer(address=self.name, host=host, port=port, notify_port=notify_port)

    @property
    def prefills(self) -> bool:
        return self.options.role != "decode"

    @property
    def decodes(self) -> bool:
        return self.options.role != "prefill"

    @property
    def decodes_alone(self) -> bool:
        """Whether it can answer a request that has no prefill leg."""
        return self.options.role == "prefill-decode" or (
            self.decodes and self.protocol.decodes_alone
        )

    @property
    def usable(self) -> bool:
        return self.healthy and not self.trouble and not self.left

    @property
    def can_prefill(self) -> bool:
        known = bool(self.peer.engine_ids) or not self.protocol.query_path
        return self.prefills and self.usable and known and not self.misfit

    def passed(self) -> bool:
        """A check has passed. Returns whether the engine was unhealthy before."""
        before, self.healthy, self.failures = self.healthy, True, 0
        if not before:
            # A leg that was still open may have found the old process unfit meanwhile.
            self.trouble = self.misfit = ""
        return not before

    def failed(self, why: str, *, at_once: bool = False) -> bool:
        """A check or a connection has failed. Returns whether the engine was healthy before.

        at_once: without waiting for a second failure.
        """
        self.failures += 1
        if not self.healthy:
            self.trouble = why
            return False
        if not at_once and self.failures < FAILURES:
            return False
        self.healthy, self.trouble, self.misfit = False, why, ""
        # Another process at this address may have another one.
        self.peer, self.varies = replace(self.peer, identity=None), False
        return True

    def unfit(self, why: str) -> None:
        """Its answer to a prefill leg says why it gets no others now."""
        if not self.misfit:
            logger.error("engine %s gets no prefill legs: %s", self.name, why)
        self.misfit = why

    def learned(self, identity: Mapping[str, Any] | None) -> None:
        """Notes the identity in an answer; None: the answer has none. One process has one, so
        another one at an engine that was not seen to end belongs to another data-parallel rank:
        then it is not known which rank takes the next leg."""
        known = self.peer.identity
        self.varies = self.varies or (None not in (known, identity) and identity != known)
        self.peer = replace(self.peer, identity=None if self.varies else identity)

    def ended(self, why: str, *, refuses: bool = False) -> None:
        for react in tuple(self.on_end):
            react(why, refuses)

    def has_ids(self, ids: dict[int, str]) -> None:
        """Ranks that are not known tell nothing: it may be starting."""
        before, self.peer = self.peer.engine_ids, replace(self.peer, engine_ids=ids)
        if any(before.get(rank, one) != one for rank, one in ids.items()):
            self.ended("another process is at its address")


@lru_cache(maxsize=64)
def trust(ca_file: str | None) -> ssl.SSLContext:
    """How certificates are checked: by this file of authorities, or those of the system.

    Read once per process: loading the system's takes a while. Raises ConfigError when the file
    cannot be read or is invalid.
    """
    return TlsFiles(ca=None if ca_file is None else Path(ca_file)).context()


#: What metrics of vLLM and SGLang tell. Their sums over all label sets are the running and waiting
#: requests.
_LOAD = {
    **dict.fromkeys(("vllm:num_requests_running", "sglang:num_running_reqs"), "running"),
    **dict.fromkeys(("vllm:num_requests_waiting", "sglang:num_queue_reqs"), "waiting"),
    # Only with disaggregation.
    "sglang:num_prefill_bootstrap_queue_reqs": "waiting",
    "sglang:num_prefill_prealloc_queue_reqs": "waiting",
    "sglang:num_prefill_inflight_queue_reqs": "waiting",
    "sglang:num_decode_prealloc_queue_reqs": "waiting",
    "sglang:num_decode_transfer_queue_reqs": "waiting",
    **dict.fromkeys(("vllm:kv_cache_usage_perc", "sglang:token_usage"), "usage"),
}


def parse_load(page: str) -> Load | None:
    """Reads an engine's Prometheus page; None without any of the metrics. Values that are negative
    or not finite are skipped.

    Only these lines are read: vLLM's page has hundreds of them, most of histograms.
    """
    told: dict[str, list[float]] = {"running": [], "waiting": [], "usage": []}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in _LOAD:
            continue
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            told[_LOAD[name]].append(value)
    if not any(told.values()):
        return None
    usage = max(told["usage"], default=0.0)
    return Load(int(sum(told["running"])), int(sum(told["waiting"])), usage)
