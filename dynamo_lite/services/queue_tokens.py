"""The prefill queue in tokens, as a metric of both kinds of workers."""

from prometheus_client import Gauge

from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.process.host import Host


def show_queue_tokens(host: Host, demand: BacklogFollower) -> None:
    Gauge(
        "dynamo_lite_prefill_queue_tokens",
        "Prompt tokens that decode workers wait for: on the prefill queue, or pulled and not"
        " yet brought",
        registry=host.registry,
    ).set_function(lambda: demand.totals().tokens)
