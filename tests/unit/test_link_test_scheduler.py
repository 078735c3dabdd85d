"""Orders and answers of link tests, slots of scratch memory."""

from dynamo_lite.disagg.counters import PREFLIGHT, Counters
from dynamo_lite.disagg.messages import PrefillStep, RankLink
from dynamo_lite.disagg.prefill.introductions import Introductions
from dynamo_lite.disagg.prefill.link_test_scheduler import LinkTestScheduler
from dynamo_lite.protocol.prefill import LinkTest
from dynamo_lite.protocol.records import Scratch
from dynamo_lite.transfer.scratch import pattern, pick_slots
from tests.builders import engine_metadata

ENGINE = engine_metadata("d")


def test_an_order_ends_when_all_ranks_have_answered():
    stats = Counters()
    book = LinkTestScheduler(stats, Introductions(lambda: b"own"))
    book.ask(LinkTest(order="1.1", target=ENGINE))
    assert book.busy
    step = PrefillStep()
    book.announce(step)
    assert [order.target_engine for order in step.link_tests] == ["d"]
    assert list(step.targets) == ["d"] and step.own == b"own" and book.busy
    book.answered({"1.1": {1: RankLink("rank 0: broken", 1, 0.5, 0.0)}}, 2)
    assert book.busy and stats.take() == {}
    book.answered({"1.1": {0: RankLink(None, 2, 0.25, 0.125)}}, 2)
    assert not book.busy
    assert stats.take() == {PREFLIGHT: [["1.1", "from rank 1: rank 0: broken", 3, 0.5, 0.125]]}


def test_an_order_that_comes_twice_is_taken_once():
    book = LinkTestScheduler(Counters(), Introductions(lambda: b"own"))
    order = LinkTest(order="1.1", target=ENGINE)
    steps = [PrefillStep() for _ in range(3)]
    for step in steps[:2]:
        book.ask(order)
        book.announce(step)
    book.answered({"1.1": {0: RankLink(None)}}, 1)
    book.ask(order)
    assert not book.busy
    book.announce(steps[2])
    assert [len(step.link_tests) for step in steps] == [1, 0, 0]


def test_links_of_one_rank_do_not_name_it():
    stats = Counters()
    book = LinkTestScheduler(stats, Introductions(lambda: b"own"))
    book.answered({"1.1": {0: RankLink("rank 0: broken")}}, 1)
    assert stats.take() == {PREFLIGHT: [["1.1", "rank 0: broken", 0, 0.0, 0.0]]}


def test_two_writers_pick_slots_of_their_own():
    region = Scratch(base=4096, slots=16, slot_bytes=64)
    picked = [pick_slots(f"{n}.1/0/d/0", region, 3) for n in range(300)]
    assert all(len(set(slots)) == 3 for slots in picked)
    assert {slots[0] for slots in picked} == set(range(region.slots))
    assert len(pick_slots("x", Scratch(base=4096, slots=2, slot_bytes=64), 3)) == 2


def test_each_try_has_a_pattern_of_its_own():
    patterns = [pattern(f"1.1/0/d/0/{number}", 64) for number in range(50)]
    assert len(set(patterns)) == 50 and {len(data) for data in patterns} == {64}
