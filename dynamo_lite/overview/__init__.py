"""A running graph as an observer sees it, for `dynamo-lite top`, `ps` and `/dashboard`."""

from dynamo_lite.overview.compose import link_state, state_of
from dynamo_lite.overview.fetch import fetch, fetch_health
from dynamo_lite.overview.model import (
    Decisions,
    Latency,
    LinkStatus,
    Overview,
    Queue,
    Transfers,
    Worker,
)
from dynamo_lite.overview.observer import Observer

__all__ = [
    "Decisions",
    "Latency",
    "LinkStatus",
    "Observer",
    "Overview",
    "Queue",
    "Transfers",
    "Worker",
    "fetch",
    "fetch_health",
    "link_state",
    "state_of",
]
