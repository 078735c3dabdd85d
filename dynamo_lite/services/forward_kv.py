"""What a Forwarder knows about its engines' KV blocks, and its metrics."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.engines import KnownEngines
from dynamo_lite.forward.kv.tokenizer import Tokenizer
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import TokenizePrompt
from dynamo_lite.policy.routing.known_blocks import KnownBlocks

if TYPE_CHECKING:
    from dynamo_lite.forward.kv.follower import KvEventFollower


@dataclass(frozen=True, slots=True)
class EngineKv:
    """The KV blocks that engines publish, and the tokeniser of the prompts that are compared
    with them."""

    known: KnownBlocks
    tokens: TokenizePrompt
    follower: "KvEventFollower"


@asynccontextmanager
async def kv_events(
    engines: KnownEngines, upstream: Upstream, config: ForwarderConfig, registry: CollectorRegistry
) -> AsyncIterator[EngineKv | None]:
    """Follows engines that publish KV events. Gives None if no engine publishes or could
    publish any."""
    if not config.discovers and not any(engine.options.kv_events for engine in engines.all):
        yield None
        return
    # ZeroMQ is loaded only where it is needed.
    from dynamo_lite.forward.kv.follower import KvEventFollower

    known = KnownBlocks(config.routing.max_index_blocks)
    tokenizer = Tokenizer(upstream, engines, known, config.tokenize_timeout_s)
    registry.register(KvMetrics(known, tokenizer))
    async with KvEventFollower(engines, known) as follower:
        yield EngineKv(known, tokenizer.tokens, follower)


class KvMetrics(Collector):
    """What engines have published about their KV blocks."""

    def __init__(self, known: KnownBlocks, tokenizer: Tokenizer):
        self._known, self._tokenizer = known, tokenizer

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield counts(
            "dynamo_lite_forward_kv_batches",
            "Batches of KV events by result: applied, seen before, malformed; times that some were"
            " missing",
            ("result",),
            {(result,): count for result, count in self._known.batches.items()},
        )
        yield counts(
            "dynamo_lite_forward_tokenized",
            "Prompts by how their tokens were found out",
            ("result",),
            {(result,): count for result, count in self._tokenizer.results.items()},
        )
        yield GaugeMetricFamily(
            "dynamo_lite_forward_kv_blocks",
            "Different KV blocks that engines hold by their own events",
            value=len(self._known),
        )
        yield GaugeMetricFamily(
            "dynamo_lite_forward_kv_engines",
            "Engines whose KV events are followed",
            value=self._known.following,
        )


def counts(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for value, count in values.items():
        family.add_metric(list(value), count)
    return family
