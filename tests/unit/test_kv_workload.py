"""Growing chats with shared system prompts over two workers: how much of each prompt is cached
where it goes, beside one worker with both caches, and beside taking turns."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from dynamo_lite.policy.routing.kv_chain import chain_hashes
from dynamo_lite.policy.routing.kv_index import KvIndex
from dynamo_lite.policy.routing.kv_routing import KvPicker, KvRoutingOptions, LoadReport, Shard
from dynamo_lite.policy.routing.pickers import Picker, RoundRobin
from dynamo_lite.protocol.records import EndpointRecord
from tests.builders import endpoint_record, generate_request

BLOCK = 16
#: Of one worker; together they hold half of all that is ever said.
CACHE_BLOCKS = 600
CHATS, TURNS, AT_A_TIME = 40, 6, 12
SYSTEM_TOKENS, TURN_TOKENS = 512, 160
#: A request is in flight while this many others begin.
RUNNING = 6


class Cache:
    """A worker's prefix cache: the deepest blocks of what was used longest ago go first."""

    def __init__(self, blocks: int, index: KvIndex | None = None, worker: int = 0):
        self._blocks, self._index, self._worker = blocks, index, worker
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, hashes: Sequence[int]) -> int:
        """How many of the first blocks were there; all are afterwards."""
        hit = next((i for i, key in enumerate(hashes) if key not in self._held), len(hashes))
        for key in reversed(hashes):
            self._held[key] = None
            self._held.move_to_end(key)
        gone = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._blocks)]
        if self._index is not None:
            self._index.stored(self._worker, hashes)
            self._index.removed(self._worker, gone)
        return hit


class View:
    def __init__(self, index: KvIndex):
        self._shard = Shard(BLOCK, index)

    def load(self, lease_id: int) -> LoadReport | None:
        return None

    def shard(self, lease_id: int) -> Shard | None:
        return self._shard


def prompts() -> Iterator[tuple[int, list[int]]]:
    """Chat and prompt; a few chats at a time, each one's turns in order."""
    rng = random.Random(5)
    systems = [[rng.randrange(1000) for _ in range(SYSTEM_TOKENS)] for _ in range(3)]
    texts = {
        chat: systems[chat % 3] + [rng.randrange(1000) for _ in range(TURNS * TURN_TOKENS)]
        for chat in range(CHATS)
    }
    waiting, open_chats = list(range(CHATS)), {}
    while waiting or open_chats:
        while waiting and len(open_chats) < AT_A_TIME:
            open_chats[waiting.pop(0)] = 0
        chat = rng.choice(sorted(open_chats))
        open_chats[chat] += 1
        yield chat, texts[chat][: SYSTEM_TOKENS + open_chats[chat] * TURN_TOKENS]
        if open_chats[chat] == TURNS:
            del open_chats[chat]


def members() -> list[EndpointRecord]:
    return [endpoint_record(lease_id) for lease_id in (1, 2)]


def hit_rate(picker: Picker, caches: dict[int, Cache]) -> tuple[float, float]:
    """Share of the prompts' blocks that was cached; share of the requests of worker 1."""
    ids, running = itertools.count(), []
    hits = blocks = first = count = 0
    for _, prompt in prompts():
        request = generate_request(f"r{next(ids)}", prompt_token_ids=prompt)
        worker = picker.pick(members(), request).member.lease_id
        hashes = chain_hashes(prompt[:-1], BLOCK)
        hits, blocks = hits + caches[worker].serve(hashes), blocks + len(hashes)
        first, count = first + (worker == 1), count + 1
        picker.answered(request.request_id)
        running.append(request.request_id)
        if len(running) > RUNNING:
            picker.released(running.pop(0))
    return hits / blocks, first / count


def test_two_workers_cache_nearly_as_much_as_one_with_both_caches():
    one = Cache(2 * CACHE_BLOCKS)
    whole, _ = hit_rate(RoundRobin(), {1: one, 2: one})
    turns, _ = hit_rate(RoundRobin(), {1: Cache(CACHE_BLOCKS), 2: Cache(CACHE_BLOCKS)})
    index, clock = KvIndex(100_000), itertools.count()
    picker = KvPicker(
        View(index), KvRoutingOptions(), now=lambda: float(next(clock)), uniform=lambda: 0.0
    )
    kv, share = hit_rate(picker, {w: Cache(CACHE_BLOCKS, index, w) for w in (1, 2)})
    assert kv >= 0.9 * whole
    assert 1 - turns > 1.5 * (1 - kv), "by turns much more is computed again"
    assert 0.25 < share < 0.75, "both work"
    assert picker.matched_tokens >= 0.9 * kv * picker.prompt_tokens
