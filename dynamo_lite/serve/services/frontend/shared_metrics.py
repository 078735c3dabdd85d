"""`/metrics` of a port that several Frontends share: the metrics of all of them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.overview.fetch import fetch
from dynamo_lite.runtime.process.status import VLLM_METRICS

#: The label that tells the Frontends apart: the number of the process.
LABEL = "frontend"


class SharedMetrics:
    """ASGI; requests for other paths go to `app`.

    The kernel chooses the process that gets a connection, so one scrape would see this one's
    metrics and the next one another's.

    members: the Frontends on this port; one that does not respond is left out.
    """

    def __init__(self, app: ASGIApp, members: Callable[[], Iterable[EndpointRecord]]):
        self._app, self._members = app, members

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") != "/metrics":
            return await self._app(scope, receive, send)
        members = {str(member.instance): member.status_url for member in self._members()}
        urls = [f"{url}{VLLM_METRICS}" for url in members.values()]
        pages = zip(members, await asyncio.gather(*map(fetch, urls)), strict=True)
        found = {instance: page.decode() for instance, page in pages if page is not None}
        # Parsing takes tens of milliseconds for each page.
        text = await asyncio.to_thread(merged, found)
        await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)


def merged(pages: Mapping[str, str]) -> bytes:
    """One page with the samples of all pages, each with its key as the label `frontend`.

    Raises ValueError for a malformed page.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(pages))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, pages: Mapping[str, str]):
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for instance, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                target = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                target.samples += [
                    sample._replace(labels={**sample.labels, LABEL: instance})
                    for sample in family.samples
                ]
        yield from families.values()

    def describe(self) -> Sequence[Metric]:
        return []
