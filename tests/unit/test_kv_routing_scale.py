"""The KV-aware picker does not look at every member, and chooses as if it did."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_chain import chain_hashes
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.kv_routing import KvPicker, LoadReport, Shard
from tests.builders import endpoint_record, generate_request
from tests.straightforward import StraightforwardPicker

WORKERS = range(1, 9)
AGE_S = 3.0
BLOCKS = (4, 8)


class View:
    """What workers 1 to 8 report. Their reports become too old."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reports: dict[int, tuple[LoadReport, float]] = {}
        self.shards: dict[int, Shard] = {}
        #: How often a worker was asked about.
        self.looks = 0

    def load(self, lease_id: int) -> LoadReport | None:
        self.looks += 1
        report, at = self.reports.get(lease_id, (None, 0.0))
        if report is None or self.now - at > AGE_S:
            return None
        return replace(report, fresh_for_s=at + AGE_S - self.now)

    def shard(self, lease_id: int) -> Shard | None:
        self.looks += 1
        return self.shards.get(lease_id)


class Pair:
    """The picker and its oracle, which get the same calls. They share one view and one index."""

    def __init__(self, seed: int):
        self.rng, self.view = random.Random(seed), View()
        self.indexes = {size: KvIndex(10_000) for size in BLOCKS}
        self.options = KvRoutingOptions()
        self.pickers = [
            kind(self.view, self.options, now=lambda: self.view.now)
            for kind in (KvPicker, StraightforwardPicker)
        ]
        self.members = tuple(endpoint_record(lease_id) for lease_id in WORKERS)
        self.running: list[str] = []
        self._ids = itertools.count()

    def prompt(self) -> list[int]:
        family = self.rng.randrange(3)
        return [family] * self.rng.randrange(1, 40) + [self.rng.randrange(3)] * 8

    def pick(self) -> None:
        rng = self.rng
        request = generate_request(
            f"r{next(self._ids)}" if rng.random() < 0.9 or not self.running else self.running[0],
            prompt_token_ids=self.prompt(),
            session=rng.choice([None, None, "a", "b"]),
        )
        without = frozenset(rng.sample(WORKERS, rng.choice([0, 0, 0, 1, 3, 8])))
        members = self.members if rng.random() < 0.8 else list(self.members)
        results: list[object] = []
        for picker in self.pickers:
            try:
                results.append(picker.pick(members, request, without))
            except NoWorkers:
                results.append(None)
        assert results[0] == results[1]
        if results[0] is not None:
            self.running.append(request.request_id)

    def answer(self) -> None:
        if self.running:
            request_id = self.rng.choice(self.running)
            for picker in self.pickers:
                picker.answered(request_id)

    def release(self) -> None:
        if self.running:
            request_id = self.running.pop(self.rng.randrange(len(self.running)))
            for picker in self.pickers:
                picker.released(request_id)

    def report(self) -> None:
        rng, lease_id = self.rng, self.rng.choice(WORKERS)
        usage = rng.choice([0.0, 0.5, 0.9, 1.0])
        report = LoadReport(rng.randrange(4), rng.randrange(0, 60, 5), usage)
        self.view.reports[lease_id] = report, self.view.now
        self._reported(lease_id)

    def index(self) -> None:
        """A worker's first snapshot has come."""
        lease_id = self.rng.choice(WORKERS)
        size = BLOCKS[lease_id % 2]
        self.view.shards[lease_id] = Shard(size, self.indexes[size])
        self._reported(lease_id)

    def hold(self) -> None:
        lease_id = self.rng.choice(WORKERS)
        if (shard := self.view.shards.get(lease_id)) is not None:
            chain = chain_hashes(self.prompt(), shard.block_size)
            if self.rng.random() < 0.7:
                shard.index.stored(lease_id, chain)
            elif chain:
                shard.index.removed(lease_id, chain[-1:], chain[:1])

    def wait(self) -> None:
        self.view.now += self.rng.randrange(16) / 4

    def join_or_leave(self) -> None:
        gone = set(self.rng.sample(WORKERS, self.rng.choice([0, 1, 2, 5])))
        for lease_id in gone:
            self.view.reports.pop(lease_id, None)
        self.members = tuple(endpoint_record(one) for one in WORKERS if one not in gone)

    def tune(self) -> None:
        rng = self.rng
        options = KvRoutingOptions(
            kv_weight=rng.choice([0.0, 1.0, 2.0]),
        )
        for picker in self.pickers:
            picker.options = options

    def _reported(self, lease_id: int) -> None:
        for picker in self.pickers:
            picker.reported(lease_id)


@pytest.mark.parametrize("seed", range(60))
def test_it_chooses_as_if_it_looked_at_every_member(seed: int):
    pair = Pair(seed)
    often = [pair.pick, pair.answer, pair.release, pair.report, pair.hold, pair.hold]
    seldom = [pair.index, pair.wait, pair.join_or_leave, pair.tune]
    for _ in range(600):
        pair.rng.choice(often if pair.rng.random() < 0.85 else seldom)()
    oracle = pair.pickers[1]
    assert sum(oracle.choices.values()) > 30
    for name in ("choices", "prompt_tokens", "matched_tokens"):
        assert getattr(pair.pickers[0], name) == getattr(oracle, name)


def crowd(workers: int) -> tuple[View, KvPicker, tuple[EndpointRecord, ...], Callable[[], None]]:
    """A picker of many members that all hold the same first blocks; `step` is one request."""
    view, index = View(), KvIndex(100_000)
    members = tuple(endpoint_record(lease_id) for lease_id in range(1, workers + 1))
    chain = list(range(1000, 1064))
    for member in members:
        view.shards[member.lease_id] = Shard(16, index)
        view.reports[member.lease_id] = LoadReport(member.lease_id % 7, 100, 0.5), 0.0
        index.stored(member.lease_id, chain[: 16 + member.lease_id % 2])
    picker = KvPicker(view, KvRoutingOptions(), now=lambda: view.now)
    for member in members:
        picker.reported(member.lease_id)
    ids = itertools.count()

    def step() -> None:
        request_id = f"r{next(ids)}"
        picker.place(members, request_id, 1024, lambda size: chain)
        picker.answered(request_id)
        picker.released(request_id)

    step()
    return view, picker, members, step


def test_a_choice_asks_about_no_member_again():
    """What is known of the members is kept: only news move them."""
    view, picker, members, step = crowd(100)
    view.looks = 0
    for _ in range(20):
        step()
    assert view.looks == 0
    view.now = AGE_S + 1
    step()
    assert view.looks == len(members), "each report was too old once"
    view.looks = 0
    picker.reported(5)
    step()
    assert view.looks == 2, "its load and its shard"


def test_many_members_cost_no_more_than_few():
    """Looking at every member would take 50 times as long here."""
    few, many = crowd(20)[-1], crowd(1000)[-1]

    def best_of(step: Callable[[], None]) -> float:
        times: list[float] = []
        for _ in range(200):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return min(times)

    assert best_of(many) < 8 * best_of(few)
