"""`dynamo-lite serve graphs.forward:Forwarder` in front of scripted engines."""

import asyncio
import json
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.builders import eventually
from tests.forwarding import TEXT, Asked, asked_engines
from tests.process.command import Serving, run, serving
from tests.scripted import Fault

GRAPH = "graphs.forward:Forwarder"


#: Each request on a connection of its own: the kernel chooses a process for each.
CLOSE = {"connection": "close"}


async def test_its_processes_share_a_port_and_drain_in_order(tmp_path: Path):
    async with AsyncExitStack() as stack:
        made = await asked_engines(stack, "nixl", 1, 1, None)
        engines = (*made["prefill"], *made["decode"])
        listed = ", ".join(f'{{url: "{engine.url}", role: {engine.role}}}' for engine in engines)
        options = (
            *("-f", "configs/forward_nixl.yaml", "--Forwarder.port=0"),
            *(f"--Forwarder.engines=[{listed}]", "--Forwarder.ServiceArgs.workers=2"),
        )
        with serving(tmp_path, *options, graph=GRAPH) as graph:
            line = await asyncio.to_thread(graph.wait_line, "ready http")
            forwarder = Asked(**made, url=line.split()[1])
            await _until_each_uses(len(engines), forwarder, _metrics_pages(graph))
            assert '"ok":true' in await _page(forwarder, f"{forwarder.url}/ready")
            health = await _page(forwarder, f"{forwarder.url}/health")
            assert '"decode_engines":1' in health and "127.0.0.1" not in health
            for _ in range(8):
                assert await forwarder.text(CLOSE) == TEXT
            listing = await asyncio.to_thread(run, "ps", "--json", "--state-dir", str(tmp_path))
            rows = json.loads(listing.stdout)
            assert [row["component"] for row in rows] == ["Forwarder", "Forwarder"]
            # A stream that is open when the graph is stopped is finished.
            draining = asyncio.Event()
            engines[1].faults.append(Fault(hold=draining))
            asked = asyncio.create_task(forwarder.stream())
            await eventually(lambda: len(engines[1].legs) >= 9, 20)
            graph.signal(signal.SIGINT)
            await asyncio.to_thread(graph.wait_line, "draining")
            draining.set()
            assert (await asked).endswith(b"[DONE]\n\n")
            assert await asyncio.to_thread(graph.end) == 0
        assert forwarder.fleet.violations == []
        for engine in engines:
            assert len(engine.legs) == 9


USABLE = "dynamo_lite_forward_engine_usable{"


def _is_ready(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "ready"


def _metrics_pages(graph: Serving, workers: int = 2) -> list[str]:
    processes = [graph.when(f"Forwarder-{n}", _is_ready) for n in range(workers)]
    return [f"{entry['status_url']}/metrics" for entry in processes]


async def _until_each_uses(engines: int, forwarder: Asked, pages: list[str]) -> None:
    """Each process finds and tries the engines by itself, and any may get the next request."""

    async def uses(page: str) -> bool:
        lines = (await _page(forwarder, page)).splitlines()
        return sum(line.startswith(USABLE) and line.endswith(" 1.0") for line in lines) == engines

    for page in pages:
        await eventually(lambda page=page: uses(page), 30)


async def _page(forwarder: Asked, url: str) -> str:
    async with forwarder.session.get(url) as answer:
        return await answer.text()
