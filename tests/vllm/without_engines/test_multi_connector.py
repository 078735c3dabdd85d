"""Another connector beside ours: who is asked, who loads, and whose blocks are whose."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.vllm.engine.connector_types import StepMetadata
from dynamo_lite.vllm.engine.multi_connector import MultiConnector
from dynamo_lite.vllm.engine.steps import filling_blocks

REQUEST = SimpleNamespace(request_id="r1")


class Ours:
    def __init__(self, tokens: int | None = 0, *, may_load: bool = True):
        self.tokens, self.may_load, self.asked, self.steps = tokens, may_load, [], []
        self.allocated: list[int] = []

    def may_load_beside(self, _request: Any) -> bool:
        return self.may_load

    def matched_beside(self, _request: Any, computed: int, offloaded: int):
        self.asked.append((computed, offloaded))
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, _request: Any, _blocks: Any, tokens: int) -> None:
        self.allocated.append(tokens)

    def step_beside(self, _output: Any, *, in_use: bool) -> StepMetadata:
        self.steps.append(in_use)
        return StepMetadata(DecodeStep())


class Other(OffloadingConnector):
    """vLLM's class, without its memory."""

    def __init__(self, tokens: int | None = 0, *, waits: bool = True):
        self.tokens, self.waits, self.looks = tokens, waits, 0
        self.allocated: list[int] = []
        self.metadata = OffloadingConnectorMetadata({}, {}, set())
        blocks = SimpleNamespace(_current_batch_allocated_block_ids=set[int]())
        self.connector_scheduler = cast("Any", blocks)

    def get_num_new_matched_tokens(self, _request: Any, _computed: int):
        self.looks += 1
        return self.tokens, self.waits

    def update_state_after_alloc(self, _request: Any, _blocks: Any, tokens: int) -> None:
        self.allocated.append(tokens)

    def build_connector_meta(self, _output: Any) -> OffloadingConnectorMetadata:
        return self.metadata


def both(ours: Ours, other: Any) -> MultiConnector:
    made = MultiConnector.__new__(MultiConnector)
    made._connectors = [cast("Any", ours), other]
    made._ours, made._other = cast("Any", ours), other
    made._requests_to_connector, made._extra_async_saves = {}, {}
    return made


def allocated(*ids: int, cached: tuple[int, ...] = ()) -> Any:
    """The null block is 0."""
    blocks = [
        SimpleNamespace(block_id=n, block_hash=b"h" if n in cached else None, is_null=n == 0)
        for n in ids
    ]
    return SimpleNamespace(blocks=(blocks,))


@pytest.mark.parametrize(
    ("ours", "theirs", "loads"),
    [
        (0, 0, (0, False)),
        (0, 64, (64, True)),
        (200, 64, (200, True)),
        (200, 0, (200, True)),
        (None, 64, (None, False)),
        (0, None, (None, False)),
    ],
)
def test_one_of_both_loads(ours: int | None, theirs: int | None, loads: tuple[int | None, bool]):
    first, second = Ours(ours), Other(theirs)
    assert both(first, second).get_num_new_matched_tokens(REQUEST, 32) == loads
    assert second.looks == 1
    assert first.asked == ([] if theirs is None else [(32, theirs)])


def test_a_prefill_that_was_preempted_loads_nothing():
    first, second = Ours(may_load=False), Other(64)
    assert both(first, second).get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert first.asked == [(0, 0)]


def test_nothing_is_loaded_that_a_prompt_does_not_wait_for():
    """Nobody would hear of the end of such a load."""
    first, second = Ours(), Other(64, waits=False)
    assert both(first, second).get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert first.asked == [(0, 0)]


def test_blocks_that_a_prefill_worker_fills_are_not_saved_any_more():
    first, second = Ours(200), Other(64)
    multi = both(first, second)
    multi.get_num_new_matched_tokens(REQUEST, 0)
    multi.update_state_after_alloc(REQUEST, allocated(3, 0, 4, 5, cached=(3,)), 200)
    assert (first.allocated, second.allocated) == ([200], [0])
    assert second.scheduler._current_batch_allocated_block_ids == {4, 5}
    second.metadata = OffloadingConnectorMetadata({}, {}, {7})
    made = multi.build_connector_meta(None)
    assert first.steps == [True], "its job waits for the saves to end"
    assert isinstance(made, MultiKVConnectorMetadata) and made.metadata[1] is second.metadata
    assert isinstance(made.metadata[0], StepMetadata)


def test_the_other_one_s_statistics_are_dropped():
    taken: list[str] = []
    own = SimpleNamespace(get_kv_connector_stats=lambda: "ours")
    other = SimpleNamespace(get_kv_connector_stats=lambda: taken.append("theirs"))
    assert both(cast("Any", own), other).get_kv_connector_stats() == "ours"
    assert taken == ["theirs"], "or they would grow"


def test_what_the_other_one_loads_is_saved_as_ever():
    first, second = Ours(0), Other(64)
    multi = both(first, second)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (64, True)
    multi.update_state_after_alloc(REQUEST, allocated(1, 2), 64)
    assert (first.allocated, second.allocated) == ([0], [64])
    assert second.scheduler._current_batch_allocated_block_ids == set()
    multi.build_connector_meta(None)
    assert first.steps == [False]


def test_a_block_is_no_prefix_for_readers_in_the_step_that_completes_it():
    """Drafts of the step before count as computed, and may be computed again."""
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r2", num_computed_tokens=65)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["r1"], num_computed_tokens=[65]),
        num_scheduled_tokens={"r1": 40, "r2": 40},
    )
    manager = SimpleNamespace(get_blocks=lambda _name: allocated(0, 1, 2, 3))
    ask = cast("Any", output), cast("Any", manager), 32
    assert filling_blocks(*ask, 0) == [2, 2]
    assert filling_blocks(*ask, 2) == [2, 1, 2], "nothing of the new one was computed before"
    assert filling_blocks(*ask, 99) == [2, 0, 1, 2]


def test_the_other_one_s_layout_is_needed():
    def child(layout: str | None) -> Any:
        return SimpleNamespace(get_required_kvcache_layout=lambda _config: layout), None

    class Multi(MultiConnector):
        needed: str | None = None

        @classmethod
        def _get_connector_classes_and_configs(cls, vllm_config: Any) -> Any:
            return [child("BLHNC"), child(cls.needed)]

    assert Multi.get_required_kvcache_layout(cast("Any", None)) == "BLHNC"
    Multi.needed = "LBHNC"
    assert Multi.get_required_kvcache_layout(cast("Any", None)) == "LBHNC"
