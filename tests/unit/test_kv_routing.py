"""The KV-aware picker: its scores, its memory, its reasons."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.kv import Load
from dynamo_lite.routing.kv_chain import chain_hashes
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.kv_routing import REASONS, KvPicker, KvRoutingOptions
from dynamo_lite.routing.worker_loads import LOST_S, OwnRequest, WorkerLoads
from tests.builders import endpoint_record

BLOCK = 4
PROMPT = list(range(100, 141))  # ten full blocks, and one token


class View:
    def __init__(self) -> None:
        self.loads: dict[int, Load] = {}
        self.indexes: dict[int, KvIndex] = {}

    def load(self, lease_id: int) -> Load | None:
        return self.loads.get(lease_id)

    def index(self, lease_id: int) -> KvIndex | None:
        return self.indexes.get(lease_id)


class Router:
    """A picker of workers 1 to n, which all tell what they hold."""

    def __init__(self, workers: int = 3, **options: Any):
        self.view, self.index = View(), KvIndex(BLOCK, 10_000)
        self.members = [endpoint_record(i + 1) for i in range(workers)]
        for m in self.members:
            self.view.indexes[m.lease_id] = self.index
        self.picker = KvPicker(self.view, KvRoutingOptions(**options))
        self._ids = itertools.count()

    def hold(self, lease_id: int, prompt: list[int], **keys: str) -> None:
        self.index.stored(lease_id, chain_hashes(prompt, BLOCK, **keys))

    def load(
        self,
        lease_id: int,
        requests: int = 0,
        tokens: int = 0,
        usage: float = 0.0,
        now: float = 0.0,
    ) -> None:
        self.view.loads[lease_id] = Load(requests, 0, usage, tokens)
        self.picker.loads.reported(lease_id, now)

    def pick(self, prompt: list[int] = PROMPT, **fields: Any) -> int:
        """The lease id of the worker that is given a new request; `last` is its id."""
        self.last = f"r{next(self._ids)}"
        request = GenerateRequest(
            request_id=self.last,
            prompt_token_ids=prompt,
            sampling=b"",
            arrival_time=1.0,
            **fields,
        )
        picked = self.picker.pick(self.members, request)
        assert picked.reason.split(":")[0] in REASONS
        return picked.member.lease_id

    @property
    def reason(self) -> str:
        """Of the only choice so far."""
        ((reason, count),) = self.picker.choices.items()
        assert count == 1
        return reason


def test_the_longest_prefix_is_followed():
    router = Router()
    router.hold(1, PROMPT[:8])
    router.hold(3, PROMPT[:24])
    assert router.pick() == 3
    assert router.reason == "prefix"
    assert router.picker.matched_tokens == 24
    assert router.picker.prompt_tokens == len(PROMPT)


def test_equal_workers_take_turns():
    router = Router(workers=4)
    picks = []
    for n in range(8):
        picks.append(router.pick([n] * 9))
        router.picker.answered(router.last)
        router.picker.released(router.last)
    assert sorted(picks[:4]) == [1, 2, 3, 4] == sorted(picks[4:])


def test_a_refused_request_leaves_nothing_behind():
    router = Router(workers=2)
    first = router.pick()
    router.picker.released(router.last)
    assert router.pick([7] * 9) != first, "by turns: the other one"
    router.picker.released(router.last)
    assert router.pick() == first, "by turns again, not for the prefix"
    assert router.picker.matched_tokens == 0


def test_a_full_cache_is_left_out_while_another_has_room():
    router = Router(workers=2)
    router.hold(1, PROMPT)
    router.load(1, usage=0.99)
    router.load(2, usage=0.5)
    assert router.pick() == 2
    router.load(2, usage=0.96)
    router.picker.released(router.last)
    assert router.pick() == 1


def test_the_only_one_is_taken_and_none_is_an_error():
    router = Router(workers=1)
    assert router.pick() == 1
    assert router.reason == "only"
    with pytest.raises(NoWorkers):
        router.members = []
        router.pick()


def test_salts_keep_prefixes_apart():
    router = Router(workers=2)
    router.hold(2, PROMPT, cache_salt="a")
    assert router.pick(cache_salt="b") == 1
    assert router.pick(cache_salt="a") == 2
    assert router.picker.choices == Counter(load=1, prefix=1)


def test_a_session_stays_where_it_was_unless_that_is_much_busier():
    router = Router(workers=2)
    home = router.pick([1] * 9, session="s")
    router.picker.answered(router.last)
    router.picker.released(router.last)
    router.load(home, tokens=17)
    assert router.pick([2] * 9, session="s") == home
    assert router.picker.choices["session"] == 1
    router.load(home, tokens=60)
    assert router.pick([3] * 9, session="s") != home


def test_others_requests_count_once_and_ours_are_not_counted_twice():
    router = Router(workers=2)
    assert router.pick([1] * 50) == 1
    router.load(1, requests=1, tokens=50)  # that one
    router.load(2, requests=9, tokens=60)  # another router's
    assert router.pick([2] * 9) == 1
    assert router.pick([3] * 9) == 1, "51 + 10 tokens are fewer than 69"


def test_requests_whose_end_was_lost_are_forgotten():
    router = Router(workers=1)
    for n in range(5):
        router.pick([n] * 50)
    router.load(1, requests=2, tokens=100, now=0.0)  # three have ended
    router.pick([5] * 50)  # on its way when the next report comes
    router.load(1, requests=2, tokens=100, now=LOST_S / 2)
    assert len(router.picker.loads.requests) == 6
    router.load(1, requests=3, tokens=150, now=LOST_S)
    assert [*router.picker.loads.requests] == ["r3", "r4", "r5"]
    router.load(1, requests=2, tokens=100, now=2 * LOST_S)
    router.load(1, requests=3, tokens=150, now=2.5 * LOST_S)
    router.load(1, requests=2, tokens=100, now=3 * LOST_S)
    assert len(router.picker.loads.requests) == 3, "not the same one was missing all the time"
    router.picker.loads.left(1)
    assert not router.picker.loads.requests


def test_blocks_stay_known_once_they_are_computed():
    router = Router(workers=2)
    first = router.pick()
    router.picker.answered(router.last)
    router.picker.released(router.last)
    assert router.pick() == first
    assert router.picker.matched_tokens == 40


@pytest.mark.parametrize("seed", range(20))
def test_bookings_come_to_nothing(seed: int):
    """Whatever the order of answers and ends, nothing stays; meanwhile the sums are right."""
    rng, view = random.Random(seed), View()
    loads, index = WorkerLoads(view), KvIndex(BLOCK, 1000)
    view.indexes = {worker: index for worker in range(3)}
    truth: dict[str, list[int]] = {}
    for n in range(200):
        match rng.choice(["book", "answer", "release"]):
            case "book":
                request_id = f"r{rng.randrange(40)}"
                truth[request_id] = [rng.randrange(3), rng.randrange(1, 50)]
                worker, tokens = truth[request_id]
                loads.book(request_id, OwnRequest(worker, [n], 2 * tokens, tokens))
                assert index.match([n]) == {worker: 1}
            case "answer" if truth:
                request_id = rng.choice(sorted(truth))
                index.leave(truth[request_id][0])
                truth[request_id][1] = 0
                loads.answered(request_id)
            case "release" if truth:
                request_id = rng.choice(sorted(truth))
                del truth[request_id]
                loads.released(request_id)
        for worker in range(3):
            mine = [tokens for at, tokens in truth.values() if at == worker]
            own = loads.own(worker)
            assert (own.requests, own.prefill_tokens) == (len(mine), sum(mine))
            assert own.prompt_tokens == 2 * sum(mine)
    for request_id in truth:
        loads.released(request_id)
    assert len(index) == 0
    assert all(loads.own(worker).requests == 0 for worker in range(3))
