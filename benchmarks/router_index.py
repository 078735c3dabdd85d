"""One system's part of `benchmarks.router`: fills its index, asks it, prints JSON.

It runs in an environment of the system's own, so it imports nothing but the standard
library before it knows which one that is.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

WORKERS = 64
BLOCK_TOKENS = 64
PROMPT_BLOCKS = 64
#: So many system prompts of so many blocks are shared by all workers.
FAMILIES = 16
SHARED_BLOCKS = 16

Event = tuple[int, int | None, list[int]]


class Workload:
    """Prompts of 4,096 tokens; one in eight is held by two workers. Hashes are random.

    blocks: different ones that the workers hold in the end, nearly.
    """

    def __init__(self, blocks: int):
        self.prompts = blocks // (PROMPT_BLOCKS - SHARED_BLOCKS)

    def family(self, prompt: int) -> list[int]:
        return _hashes(f"family {prompt % FAMILIES}", SHARED_BLOCKS)

    def hashes(self, prompt: int) -> list[int]:
        return self.family(prompt) + _hashes(f"prompt {prompt}", PROMPT_BLOCKS - SHARED_BLOCKS)

    def holders(self, prompt: int) -> list[int]:
        first = prompt // FAMILIES % WORKERS
        return [first, (first + 7) % WORKERS] if prompt % 8 == 0 else [first]

    def stored(self) -> Iterator[Event]:
        """Worker, parent and blocks of each event: what is new to the worker."""
        known: set[tuple[int, int]] = set()
        for prompt in range(self.prompts):
            hashes = self.hashes(prompt)
            for worker in self.holders(prompt):
                new = (worker, prompt % FAMILIES) not in known
                known.add((worker, prompt % FAMILIES))
                yield (
                    (worker, None, hashes)
                    if new
                    else (worker, hashes[SHARED_BLOCKS - 1], hashes[SHARED_BLOCKS:])
                )

    def removed(self) -> Iterator[Event]:
        """The last quarter of every tenth prompt, one event for each eight blocks."""
        for prompt in range(0, self.prompts, 10):
            hashes = self.hashes(prompt)
            for worker in self.holders(prompt):
                for end in (PROMPT_BLOCKS, PROMPT_BLOCKS - 8):
                    yield worker, None, hashes[end - 8 : end]

    def questions(self, count: int) -> Iterator[tuple[list[int], dict[int, int] | None]]:
        """Hashes, and the answer where it is easy to say: prompts that are held, prompts
        of which only the system prompt is, and prompts of which nothing is."""
        rng = random.Random("questions")
        for number in range(count):
            prompt = rng.randrange(self.prompts)
            if number % 3 == 0:
                yield self.hashes(prompt), None
                continue
            own = PROMPT_BLOCKS - (SHARED_BLOCKS if number % 3 == 1 else 0)
            head = self.family(prompt) if number % 3 == 1 else []
            answer = {worker: SHARED_BLOCKS for worker in range(WORKERS)} if head else {}
            yield head + _hashes(f"unknown {number}", own), answer


def _hashes(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(56) for _ in range(count)]


class Ours:
    def __init__(self) -> None:
        from dynamo_lite.protocol import codec, kv
        from dynamo_lite.routing.kv_chain import chain_hashes
        from dynamo_lite.routing.kv_index import KvIndex

        self._codec, self._kv, self._chain_hashes = codec, kv, chain_hashes
        self._index = KvIndex(BLOCK_TOKENS, 4_000_000)

    def message(self, event: Event, *, removed: bool) -> bytes:
        worker, _, hashes = event
        change = self._kv.KvRemoved(hashes) if removed else self._kv.KvStored(hashes)
        return self._codec.encode(
            self._kv.KvNotice(lease_id=worker, number=1, load=self._kv.Load(), changes=[change])
        )

    def apply(self, worker: int, message: bytes) -> None:
        notice = self._kv.decode_kv_notice(message)
        for change in notice.changes:
            if isinstance(change, self._kv.KvStored):
                self._index.stored(worker, change.hashes)
            else:
                self._index.removed(worker, change.hashes)

    def match(self, hashes: list[int]) -> dict[int, int]:
        return self._index.match(hashes)

    def hash(self, tokens: list[int]) -> list[int]:
        return self._chain_hashes(tokens, BLOCK_TOKENS)

    def leave(self, worker: int) -> None:
        self._index.leave(worker)


class Peer:
    """The Rust indexer of ai-dynamo-runtime. It matches hashes of single blocks, and
    removes by hashes of prefixes; here they differ by a constant."""

    _PREFIX = 1 << 57

    def __init__(self) -> None:
        from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore

        self._tree, self._hash = RadixTree(), compute_block_hash_for_seq
        self._number = 0

    def message(self, event: Event, *, removed: bool) -> bytes:
        _, parent, hashes = event
        if removed:
            data: dict[str, Any] = {"removed": {"block_hashes": [h | self._PREFIX for h in hashes]}}
        else:
            blocks = [
                {"block_hash": h | self._PREFIX, "tokens_hash": h, "mm_extra_info": None}
                for h in hashes
            ]
            before = None if parent is None else parent | self._PREFIX
            data = {"stored": {"parent_hash": before, "blocks": blocks}}
        self._number += 1
        return json.dumps({"event_id": self._number, "data": data, "dp_rank": 0}).encode()

    def apply(self, worker: int, message: bytes) -> None:
        self._tree.apply_event(worker, message)

    def match(self, hashes: list[int]) -> dict[int, int]:
        return self._tree.find_matches(hashes).scores

    def hash(self, tokens: list[int]) -> list[int]:
        return self._hash(tokens, BLOCK_TOKENS)

    def leave(self, worker: int) -> None:
        self._tree.remove_worker(worker)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["ours", "peer"])
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--questions", type=int, required=True)
    options = parser.parse_args()
    system = Ours() if options.system == "ours" else Peer()
    print(json.dumps(measure(system, Workload(options.blocks), options.questions)))


def measure(system: Ours | Peer, workload: Workload, questions: int) -> dict[str, float]:
    """Rates per second; times in microseconds; memory in MiB."""
    gc.collect()
    before = _rss()
    stored = [_timed_event(system, event, removed=False) for event in workload.stored()]
    memory = _rss() - before
    removed = [_timed_event(system, event, removed=True) for event in workload.removed()]
    matches: list[float] = []
    for hashes, answer in workload.questions(questions):
        began = time.perf_counter()
        found = system.match(hashes)
        matches.append(time.perf_counter() - began)
        _check(found, answer, hashes)
    rng = random.Random("tokens")
    tokens = [rng.randrange(100_000) for _ in range(BLOCK_TOKENS * PROMPT_BLOCKS)]
    began = time.perf_counter()
    system.leave(5)
    left = time.perf_counter() - began
    return {
        "stored_per_s": 1 / _typical(stored),
        "removed_per_s": 1 / _typical(removed),
        "matches_per_s": 1 / _typical(matches),
        "match_us": 1e6 * _typical(matches),
        "hash_us": 1e6 * _typical([_timed(lambda: system.hash(tokens)) for _ in range(500)]),
        "leave_us": 1e6 * left,
        "memory_mib": memory / 2**20,
    }


def _timed_event(system: Ours | Peer, event: Event, *, removed: bool) -> float:
    message = system.message(event, removed=removed)
    return _timed(lambda: system.apply(event[0], message))


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _typical(times: list[float]) -> float:
    """The mean of the middle half: other load on the machine makes a few very long."""
    times = sorted(times)
    quarter = len(times) // 4
    return statistics.fmean(times[quarter : len(times) - quarter] or times)


def _check(found: Any, answer: dict[int, int] | None, hashes: list[int]) -> None:
    """That it was the same question, and a right answer."""
    counts = {worker if isinstance(worker, int) else worker[0]: n for worker, n in found.items()}
    if answer is not None:
        assert counts == answer, (counts, answer)
    else:
        assert max(counts.values()) in (PROMPT_BLOCKS, PROMPT_BLOCKS - 16), counts


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
