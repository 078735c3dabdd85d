"""Two Frontends on one port, over workers with null engines."""

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from dynamo_lite.serve.processes import is_alive
from tests.builders import eventually
from tests.chaos.load import Load
from tests.hosts.load import told_questions
from tests.process.command import Serving, serving
from tests.started import VLLM_PATIENCE_S

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

#: That all of them go to one of two processes has a chance of 2 ** -23.
CLIENTS = 24
#: Answers take 6 s.
OPTIONS = ("-f", "configs/agg.yaml", "--Frontend.port=0", "--VllmWorker.step-s=0.02")


def running(graph: Serving) -> list[int]:
    """Requests of each Frontend."""
    urls = [graph.processes()[f"Frontend-{n}"]["status_url"] for n in range(2)]
    return [httpx.get(f"{url}/health", timeout=10).json()["requests"] for url in urls]


async def test_one_that_is_killed_costs_its_own_streams_only(tmp_path: Path):
    """Every other stream continues, new connections are accepted at once, and the Frontend is
    started again.

    Linux closes the streams of a process that dies before the port on which it listens: who asks
    again at once may reach it once more.
    """
    killed_at = ended_at = float("inf")

    def excuse(began: float) -> str:
        if began < killed_at:
            return "its Frontend was killed"
        return "its Frontend was dying" if max(began, time.monotonic() - 1) < ended_at else ""

    two = "--Frontend.ServiceArgs.workers=2"
    with serving(tmp_path, *OPTIONS, two, graph="tests.process.roles_graph:Served") as graph:
        line = await asyncio.to_thread(graph.wait_line, "ready http", VLLM_PATIENCE_S)
        load = Load(
            int(line.split()[1].rpartition(":")[2]),
            *told_questions([300] * 8),
            clients=CLIENTS,
            pause_s=0.0,
            cancels=0.0,
            excuse=excuse,
        )
        async with load:
            await eventually(lambda: sum(running(graph)) == CLIENTS, 30)
            held, other = running(graph)
            assert held and other
            before = graph.processes()["Frontend-0"]
            killed_at = time.monotonic()
            os.kill(before["pid"], signal.SIGKILL)
            await eventually(lambda: not is_alive(before["pid"]))
            ended_at = time.monotonic()
            await eventually(lambda: load.tally.right >= CLIENTS, 60)
            load.stop()
        tally = load.tally
        assert tally.excused["its Frontend was killed"] == held
        assert (tally.lost, tally.refused, tally.wrong) == ({}, {}, 0)

        def again() -> bool:
            entry = graph.processes()["Frontend-0"]
            return entry["state"] == "ready" and entry["pid"] != before["pid"]

        await eventually(again, VLLM_PATIENCE_S)
