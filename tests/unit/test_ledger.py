"""The ledger: each arrow of its drawing, and random lives checked against a model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from dynamo_lite.policy.ledger import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Ledger,
    Outcome,
    Release,
    State,
)

GRACE, LEAVING = 10.0, 1.0
BLOCKS = (4, 5, 6)
WRITER, OTHER = 0xA, 0xB


def withdrawn(outcome):
    """What a withdrawal tells the engine."""
    return [GiveUp("r", "a"), Ended("r", "a", outcome)]


def held(outcome, *, sequence=9):
    """What a withdrawal under a claim tells everybody."""
    job = [DeleteJob(sequence)] if sequence is not None else []
    return [Hold("a", BLOCKS), CancelWriter(WRITER, "a"), *job, *withdrawn(outcome)]


@pytest.fixture
def empty():
    return Ledger(writer_grace_s=GRACE, leaving_s=LEAVING)


@pytest.fixture
def queued(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    assert empty.published("a", 9) == []
    return empty


@pytest.fixture
def claimed(queued):
    assert queued.claim("a", WRITER, now=1.0) is None
    return queued


@pytest.fixture
def quarantined(claimed):
    assert claimed.request_finished("r") == held(Outcome.CANCELLED)
    return claimed


def counts(ledger):
    return ledger.waiting, ledger.quarantined


def test_states_and_counts_along_the_way(empty):
    assert (repr(empty), counts(empty), empty.state("a")) == ("<Ledger empty>", (0, 0), None)
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    assert (repr(empty), counts(empty)) == ("<Ledger a:queued>", (1, 0))
    empty.claim("a", WRITER, now=1.0)
    assert (repr(empty), counts(empty)) == ("<Ledger a:claimed>", (1, 0))
    empty.request_finished("r")
    assert (repr(empty), counts(empty)) == ("<Ledger a:quarantined>", (0, 1))
    empty.writer_done("a", written=False)
    assert (repr(empty), counts(empty)) == ("<Ledger empty>", (0, 0))


# QUEUED


def test_a_queue_that_refuses_ends_the_attempt(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    assert empty.not_published("a") == withdrawn(Outcome.REFUSED)
    assert empty.claim("a", WRITER, now=1.0) == "unknown or ended attempt"
    assert empty.not_published("a") == []


def test_a_claim_proves_that_the_queue_has_the_job_after_all(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    assert empty.claim("a", WRITER, now=1.0) is None
    assert empty.not_published("a") == []
    assert empty.state("a") is State.CLAIMED


def test_a_cancelled_queued_attempt_is_over_at_once(queued):
    assert queued.request_finished("r") == [DeleteJob(9), *withdrawn(Outcome.CANCELLED)]
    assert counts(queued) == (0, 0)


def test_a_job_that_is_published_after_its_attempt_ended_is_deleted(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    assert empty.request_finished("r") == withdrawn(Outcome.CANCELLED)
    assert empty.published("a", 9) == [DeleteJob(9)]


def test_a_job_that_is_published_after_its_withdrawal_is_deleted(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    empty.claim("a", WRITER, now=1.0)
    assert empty.request_finished("r") == held(Outcome.CANCELLED, sequence=None)
    assert empty.published("a", 9) == [DeleteJob(9)]
    assert empty.state("a") is State.QUARANTINED


def test_the_deadline_of_a_queued_attempt(queued):
    assert queued.tick(99.999) == []
    assert queued.claim("a", WRITER, now=100.0) == "past its deadline"
    assert queued.tick(100.0) == [DeleteJob(9), *withdrawn(Outcome.DEADLINE)]
    assert queued.tick(1000.0) == []


def test_writers_that_leave_do_not_touch_a_queued_attempt(queued):
    queued.writer_gone(WRITER, now=1.0)
    assert queued.tick(50.0) == []
    assert queued.state("a") is State.QUEUED


def test_an_engine_that_leaves_takes_back_what_nobody_claimed(queued):
    queued.allocated("s", "b", (7,), deadline=100.0)
    queued.claim("b", WRITER, now=1.0)
    assert queued.leave() == [DeleteJob(9), *withdrawn(Outcome.LEAVING)]
    assert queued.leave() == []
    assert queued.state("b") is State.CLAIMED


def test_a_word_about_a_queued_attempt_from_nobody_is_ignored(queued):
    assert queued.writer_done("a", written=False) == []
    assert queued.state("a") is State.QUEUED


# claim


def test_one_writer_holds_the_claim_and_may_ask_again(claimed):
    assert claimed.claim("a", WRITER, now=2.0) is None
    assert claimed.claim("a", OTHER, now=2.0) == "claimed by a"


def test_a_claim_of_nothing(empty):
    assert empty.claim("a", WRITER, now=1.0) == "unknown or ended attempt"


def test_no_claim_after_withdrawal(quarantined):
    assert quarantined.claim("a", WRITER, now=2.0) == "withdrawn"
    assert quarantined.claim("a", OTHER, now=2.0) == "withdrawn"


def test_no_claim_after_the_writer_has_written(claimed):
    """A second grant would let writes into blocks whose request already decodes."""
    assert claimed.writer_done("a", written=True) == []
    assert claimed.claim("a", WRITER, now=2.0) == "written already"


def test_no_claim_for_a_writer_whose_lease_is_gone(queued):
    """Its late message would otherwise hold the attempt for a writer that never comes."""
    queued.writer_gone(WRITER, now=1.0)
    assert queued.claim("a", WRITER, now=2.0) == "the writer's lease is gone"
    assert queued.claim("a", OTHER, now=2.0) is None


def test_only_so_many_gone_leases_are_remembered(queued):
    for lease in range(5000):
        queued.writer_gone(lease, now=1.0)
    assert queued.claim("a", 4999, now=2.0) == "the writer's lease is gone"
    assert queued.claim("a", 0, now=2.0) is None


# CLAIMED


def test_received(claimed):
    assert claimed.received("r") == [Ended("r", "a", Outcome.COMMITTED)]
    assert claimed.received("r") == []
    assert claimed.request_finished("r") == []
    assert claimed.writer_done("a", written=True) == []
    assert counts(claimed) == (0, 0)


def test_received_before_the_claim_is_known_to_be_published(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0)
    empty.claim("a", WRITER, now=1.0)
    empty.received("r")
    assert empty.published("a", 9) == [DeleteJob(9)]


def test_a_writer_that_failed_leaves_nothing_to_hold(claimed):
    assert claimed.writer_done("a", written=False) == [
        DeleteJob(9),
        *withdrawn(Outcome.WRITER_FAILED),
    ]


def test_a_writer_that_has_written_leaves_nothing_to_hold(claimed):
    assert claimed.writer_done("a", written=True) == []
    assert claimed.request_finished("r") == [DeleteJob(9), *withdrawn(Outcome.CANCELLED)]


def test_a_writer_that_has_written_may_leave(claimed):
    claimed.writer_done("a", written=True)
    claimed.writer_gone(WRITER, now=2.0)
    assert claimed.tick(2.0 + LEAVING + GRACE) == []
    assert claimed.received("r") == [Ended("r", "a", Outcome.COMMITTED)]


def test_the_deadline_of_a_claimed_attempt(claimed):
    assert claimed.tick(99.999) == []
    assert claimed.tick(100.0) == held(Outcome.DEADLINE)


def test_a_lost_writer_is_given_time_for_its_word_and_for_what_it_sent(claimed):
    claimed.writer_gone(OTHER, now=1.5)
    claimed.writer_gone(WRITER, now=2.0)
    assert claimed.tick(2.0 + LEAVING - 0.001) == []
    assert claimed.tick(2.0 + LEAVING) == held(Outcome.WRITER_LOST)
    assert claimed.tick(2.0 + LEAVING + GRACE - 0.001) == []
    assert claimed.tick(2.0 + LEAVING + GRACE) == [Release("a")]


def test_a_lost_writer_whose_loss_is_noticed_very_late(claimed):
    claimed.writer_gone(WRITER, now=2.0)
    assert claimed.tick(99.0) == [*held(Outcome.WRITER_LOST), Release("a")]
    assert counts(claimed) == (0, 0)


def test_a_writer_that_said_it_is_done_before_it_counts_as_lost(claimed):
    claimed.writer_gone(WRITER, now=2.0)
    claimed.writer_done("a", written=True)
    assert claimed.tick(2.0 + LEAVING + GRACE) == []
    assert claimed.received("r") == [Ended("r", "a", Outcome.COMMITTED)]


def test_a_leaving_writer_that_stays_is_waited_for(claimed):
    claimed.writer_gone(WRITER, now=2.0)
    claimed.writer_stays("a", WRITER, 3.0, now=2.5)
    assert claimed.tick(5.499) == []
    claimed.writer_stays("a", WRITER, 3.0, now=5.0)
    assert claimed.tick(7.999) == []
    assert claimed.received("r") == [Ended("r", "a", Outcome.COMMITTED)]


def test_a_leaving_writer_that_falls_silent_is_lost_and_given_the_grace(claimed):
    """Its promise says when it starts its last write, not when that lands."""
    claimed.writer_gone(WRITER, now=2.0)
    claimed.writer_stays("a", WRITER, 3.0, now=2.5)
    assert claimed.tick(5.5) == held(Outcome.WRITER_LOST)
    assert claimed.tick(5.5 + GRACE - 0.001) == []
    assert claimed.tick(5.5 + GRACE) == [Release("a")]


def test_a_promise_counts_only_from_the_writer_and_only_when_it_leaves(claimed):
    claimed.writer_stays("a", WRITER, 3.0, now=1.0)
    claimed.writer_stays("b", WRITER, 3.0, now=1.0)
    assert claimed.tick(50.0) == []
    claimed.writer_gone(WRITER, now=50.0)
    claimed.writer_stays("a", OTHER, 30.0, now=50.0)
    assert claimed.tick(50.0 + LEAVING) == held(Outcome.WRITER_LOST)


# QUARANTINED


@pytest.mark.parametrize("written", [True, False])
def test_the_writer_s_word_releases(quarantined, written):
    assert quarantined.writer_done("a", written=written) == [Release("a")]
    assert quarantined.writer_done("a", written=written) == []


def test_a_late_commit_and_a_late_end_change_nothing(quarantined):
    assert quarantined.received("r") == []
    assert quarantined.request_finished("r") == []
    assert quarantined.not_published("a") == []
    assert quarantined.state("a") is State.QUARANTINED


def test_a_gone_writer_releases_after_the_grace(quarantined):
    quarantined.writer_gone(WRITER, now=5.0)
    assert quarantined.tick(5.0 + LEAVING + GRACE - 0.001) == []
    assert quarantined.tick(5.0 + LEAVING + GRACE) == [Release("a")]


def test_a_cancelled_writer_that_stays_is_not_cut_short(quarantined):
    quarantined.writer_gone(WRITER, now=5.0)
    quarantined.writer_stays("a", WRITER, 3.0, now=14.0)
    assert quarantined.tick(17.0 + GRACE - 0.001) == []
    assert quarantined.tick(17.0 + GRACE) == [Release("a")]


def test_a_gone_writer_s_own_word_releases_earlier(quarantined):
    quarantined.writer_gone(WRITER, now=5.0)
    assert quarantined.writer_done("a", written=False) == [Release("a")]
    assert quarantined.tick(5.0 + LEAVING + GRACE) == []


def test_time_alone_never_releases_but_the_writer_is_told_again(quarantined):
    assert quarantined.tick(10.0) == []
    assert quarantined.tick(10.0 + GRACE) == [CancelWriter(WRITER, "a")]
    assert quarantined.tick(10.0 + GRACE + 0.001) == []
    assert quarantined.tick(1e9) == [CancelWriter(WRITER, "a")]
    assert quarantined.state("a") is State.QUARANTINED


# Random lives


@dataclass
class Fact:
    """What the model knows of one attempt."""

    request: str
    deadline: float
    wanted: bool = True
    writer: int | None = None
    writer_ended: bool = False
    quiet_at: float | None = None  # when the writer, dead or leaving, starts its last write
    held: bool = False
    released: bool = False
    endings: list[Outcome] = field(default_factory=list)

    def writable(self, now):
        """Whether a granted writer may still touch the blocks."""
        if self.writer is None or self.writer_ended:
            return False
        return self.quiet_at is None or now < self.quiet_at + GRACE


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, as the network and the engine may produce them."""

    attempts = Bundle("attempts")
    writers = Bundle("writers")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(writer_grace_s=GRACE, leaving_s=LEAVING)
        self.now = 0.0
        self.facts: dict[str, Fact] = {}
        self.gone: set[int] = set()
        self.pushing: set[str] = set()
        self.fresh = 0

    def current(self, request):
        return next((f for f in self.facts.values() if f.request == request and f.wanted), None)

    def apply(self, instructions):
        """Carries the instructions out in the model, in their order."""
        deleted: list[str] = []
        for instruction in instructions:
            match instruction:
                case Hold(attempt, block_ids):
                    fact = self.facts[attempt]
                    assert not fact.held and block_ids == self.blocks(attempt)
                    fact.held = True
                case Release(attempt):
                    fact = self.facts[attempt]
                    assert fact.held and not fact.released
                    assert not fact.writable(self.now)
                    fact.released = True
                case GiveUp(request, attempt):
                    fact = self.facts[attempt]
                    assert fact.request == request
                    assert fact.held or not fact.writable(self.now)
                case Ended(request, attempt, outcome):
                    fact = self.facts[attempt]
                    assert fact.request == request
                    if outcome is Outcome.WRITER_LOST:
                        assert fact.quiet_at is not None and self.now >= fact.quiet_at
                    fact.endings.append(outcome)
                    fact.wanted = False
                case CancelWriter(writer, attempt):
                    assert self.facts[attempt].writer == writer
                    assert not self.facts[attempt].released
                case DeleteJob(sequence):
                    deleted.append(f"a{sequence}")
        assert not any(self.facts[attempt].wanted for attempt in deleted)

    @staticmethod
    def blocks(attempt):
        number = int(attempt[1:])
        return (3 * number, 3 * number + 1)

    @initialize(target=writers)
    def two_writers(self):
        return multiple(1, 2)

    @rule(target=writers)
    def a_writer_joins(self):
        self.fresh += 1
        return 100 + self.fresh

    @rule(target=attempts, seconds=st.sampled_from([0.0, 5.0, 30.0]))
    def allocated(self, seconds):
        self.fresh += 1
        attempt, request = f"a{self.fresh}", f"r{self.fresh}"
        self.facts[attempt] = Fact(request, self.now + seconds)
        self.ledger.allocated(request, attempt, self.blocks(attempt), self.now + seconds)
        self.pushing.add(attempt)
        return attempt

    @rule(attempt=attempts)
    def published(self, attempt):
        if attempt in self.pushing:
            self.pushing.remove(attempt)
            out = self.ledger.published(attempt, int(attempt[1:]))
            assert bool(out) == (not self.facts[attempt].wanted)
            self.apply(out)

    @rule(attempt=attempts)
    def not_published(self, attempt):
        if attempt in self.pushing:
            self.pushing.remove(attempt)
            claimed = self.facts[attempt].writer is not None
            out = self.ledger.not_published(attempt)
            assert not (claimed and out)
            self.apply(out)

    @rule(attempt=attempts, writer=writers)
    def claim(self, attempt, writer):
        fact = self.facts[attempt]
        refusal = self.ledger.claim(attempt, writer, self.now)
        may = (
            fact.wanted
            and self.now < fact.deadline
            and writer not in self.gone
            and fact.writer in (None, writer)
            and not fact.writer_ended
        )
        assert (refusal is None) == may, refusal
        if may:
            fact.writer = writer

    @rule(attempt=attempts, written=st.booleans())
    def writer_done(self, attempt, written):
        """Only a writer that was granted the claim says so; its word may come twice."""
        fact = self.facts[attempt]
        if fact.writer is not None:
            fact.writer_ended = True
            self.apply(self.ledger.writer_done(attempt, written=written))

    @rule(writer=writers)
    def writer_gone(self, writer):
        self.gone.add(writer)
        for fact in self.facts.values():
            if fact.writer == writer and not fact.writer_ended:
                fact.quiet_at = max(fact.quiet_at or 0.0, self.now)
        self.ledger.writer_gone(writer, self.now)

    @rule(attempt=attempts, seconds=st.sampled_from([0.5, 3.0]))
    def writer_stays(self, attempt, seconds):
        fact = self.facts[attempt]
        if fact.writer in self.gone and fact.wanted:
            self.ledger.writer_stays(attempt, fact.writer, seconds, self.now)
            fact.quiet_at = self.now + seconds

    @rule()
    def engine_leaves(self):
        unclaimed = [f for f in self.facts.values() if f.wanted and f.writer is None]
        self.apply(self.ledger.leave())
        assert not any(f.wanted for f in unclaimed)

    @rule(attempt=attempts)
    def received(self, attempt):
        """Notices come from a granted writer only, and perhaps too late."""
        fact = self.facts[attempt]
        if fact.writer is not None:
            out = self.ledger.received(fact.request)
            assert [o.outcome for o in out] == [Outcome.COMMITTED] * fact.wanted
            self.apply(out)

    @rule(attempt=attempts)
    def request_finished(self, attempt):
        fact = self.facts[attempt]
        out = self.ledger.request_finished(fact.request)
        assert bool(out) == fact.wanted
        self.apply(out)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, GRACE]))
    def tick(self, seconds):
        self.now += seconds
        self.apply(self.ledger.tick(self.now))
        late = [f for f in self.facts.values() if f.wanted and self.now >= f.deadline]
        assert not late

    @invariant()
    def books_agree(self):
        waiting = [f for f in self.facts.values() if f.wanted]
        held = [f for f in self.facts.values() if f.held and not f.released]
        assert self.ledger.waiting == len(waiting)
        assert self.ledger.quarantined == len(held)
        assert all(len(f.endings) == (not f.wanted) for f in self.facts.values())

    def teardown(self):
        """Deadlines pass, every writer leaves: nothing remains."""
        self.now += 100.0
        self.apply(self.ledger.tick(self.now))
        for writer in {f.writer for f in self.facts.values() if f.writer is not None}:
            self.writer_gone(writer)
        self.now += 2 * GRACE
        self.apply(self.ledger.tick(self.now))
        assert repr(self.ledger) == "<Ledger empty>"
        for fact in self.facts.values():
            assert len(fact.endings) == 1
            assert fact.held == fact.released


TestLedgerLives = LedgerMachine.TestCase
# No shrinking: forty steps read well enough, and shrinking them takes minutes.
TestLedgerLives.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
