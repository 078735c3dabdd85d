"""Options of the shared graph `slow`, and actions on its prefill worker."""

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator

from dynamo_lite.protocol.health import EngineStatus
from tests.vllm.asking import prompt_ids, tokens_of
from tests.vllm.graph import Graph, PlainServer
from tests.vllm.test_decisions import REMOTE, counting

#: What the broker takes at all.
MAX_JOBS = 8
LEASE_S = 5
#: Impatient, and quick to notice the dead. Chunks of one block: a prefill is under way long
#: enough to be caught half-way. The broker takes few jobs.
SLOW_OPTIONS = (
    f"--Graph.lease-ttl-s={LEASE_S}",
    f"--Common.queue.max-jobs={MAX_JOBS}",
    "--PrefillWorker.max-num-batched-tokens=32",
    "--PrefillWorker.max-num-seqs=4",
    "--VllmWorker.remote-prefill-timeout-s=20",
    "--VllmWorker.max-prefill-queue-size=4",
    # Queued jobs must stay on the queue while the worker is stopped.
    "--VllmWorker.max-queue-wait-s=600",
)

_RUNS_S, _STANDS_S = 0.01, 0.24


def longs(count: int, seed: int, tokens: int = 1200) -> list[dict]:
    return [{"prompt": prompt_ids(tokens + i, seed), "max_tokens": 6} for i in range(count)]


@contextlib.contextmanager
def throttled(pid: int) -> Iterator[None]:
    """A process that gets little time, but some every quarter of a second."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(_STANDS_S)
            os.kill(pid, signal.SIGCONT)
            over.wait(_RUNS_S)

    holding = threading.Thread(target=hold, name="throttle")
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()


async def until(graph: Graph, wanted: Callable[..., bool], *, timeout_s: float = 20) -> None:
    """Waits for a state of the decode engine (EngineStatus). It must last for seconds."""
    status: EngineStatus | None = None
    try:
        async with asyncio.timeout(timeout_s), graph.asking_pools() as ask:
            while status is None or not wanted(status):
                (status,) = await ask()
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {status}") from None


def outcomes(graph: Graph, outcome: str) -> float:
    return graph.count("VllmWorker", REMOTE, outcome=outcome)


async def works_remotely(graph: Graph, reference: PlainServer, seed: int) -> None:
    """The decode worker has seen the prefill worker, and what they do together is right."""
    since = counting(graph)
    async with asyncio.timeout(20):
        while "remote/long" not in since():
            (probe,) = longs(1, seed=random.randrange(1 << 30))
            await tokens_of(graph.url, [probe])
    since = counting(graph)
    committed = outcomes(graph, "committed")
    requests = longs(2, seed)
    assert await tokens_of(graph.url, requests, 1) == await tokens_of(reference.url, requests)
    assert since() == {"remote/long": 2}
    assert outcomes(graph, "committed") == committed + 2
