"""The ledger: each arrow of its drawing, and random lives checked against a model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_lite.disagg.attempts.attempt import AttemptState, Refusal, Terms
from dynamo_lite.disagg.attempts.instructions import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Outcome,
    Release,
)
from dynamo_lite.disagg.attempts.ledger import Ledger

GRACE, LEAVING = 10.0, 1.0
BLOCKS = (4, 5, 6)
WRITER, OTHER = 0xA, 0xB
GONE = Refusal("the writer's lease is gone", elsewhere=True)


def withdrawn(outcome):
    """The instructions of a withdrawal for the engine."""
    return [GiveUp("r", "a"), Ended("r", "a", outcome)]


def held(outcome, *, sequence=9):
    """All instructions of a withdrawal under a claim."""
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


# QUEUED


def test_writers_are_named_as_long_as_they_may_write(queued):
    assert queued.writers == frozenset()
    queued.claim("a", WRITER, now=1.0)
    assert queued.writers == {WRITER}
    queued.request_finished("r")
    assert (queued.quarantined, queued.writers) == (1, {WRITER})
    queued.allocated("s", "b", BLOCKS, deadline=100.0)
    queued.claim("b", OTHER, now=2.0)
    assert queued.writers == {WRITER, OTHER}
    queued.writer_done("a", WRITER, written=False)
    queued.received("s")
    assert queued.writers == frozenset()


def test_a_cancelled_queued_attempt_is_over_at_once(queued):
    assert queued.request_finished("r") == [DeleteJob(9), *withdrawn(Outcome.CANCELLED)]
    assert counts(queued) == (0, 0)


def test_the_deadline_of_a_queued_attempt(queued):
    assert queued.tick(99.999) == []
    assert queued.claim("a", WRITER, now=100.0) == Refusal("past its deadline")
    assert queued.tick(100.0) == [DeleteJob(9), *withdrawn(Outcome.DEADLINE)]
    assert queued.tick(1000.0) == []


@pytest.mark.parametrize("why", [Outcome.LEAVING, Outcome.NO_WRITER, Outcome.QUEUE_LOST])
def test_what_nobody_claimed_is_taken_back_when_nobody_will(queued, why):
    queued.allocated("s", "b", (7,), deadline=100.0)
    queued.claim("b", WRITER, now=1.0)
    assert queued.withdraw_queued(why) == [DeleteJob(9), *withdrawn(why)]
    assert queued.withdraw_queued(why) == []
    assert queued.state("b") is AttemptState.CLAIMED


TAKEN_BACK = [GiveUp("r", "a"), Ended("r", "a", Outcome.TAKEN_BACK, "no claim for 2.50 s")]


@pytest.fixture
def impatient(empty):
    empty.allocated("r", "a", BLOCKS, deadline=100.0, queued_at=10.0, max_queue_wait_s=2.0)
    return empty


def test_a_queued_attempt_is_taken_back_and_nobody_gets_its_claim(impatient):
    assert impatient.published("a", 9) == impatient.tick(11.999) == []
    assert impatient.tick(12.5) == [DeleteJob(9), *TAKEN_BACK]
    assert counts(impatient) == (0, 0)
    assert impatient.claim("a", WRITER, now=12.5) == Refusal("unknown or ended attempt")
    assert impatient.tick(13.0) == []
    assert impatient.published("a", 9) == [DeleteJob(9)]
    assert impatient.not_published("a") == impatient.writer_done("a", WRITER, written=False) == []


def test_an_attempt_is_kept_while_others_are_claimed(impatient):
    impatient.allocated("s", "b", (7,), 100.0, queued_at=10.0, max_queue_wait_s=2.0)
    assert impatient.claim("b", WRITER, now=11.5) is None
    assert impatient.claim("c", WRITER, now=13.0) == Refusal("unknown or ended attempt")
    assert impatient.tick(13.499) == []
    assert impatient.tick(13.5)[-1].outcome is Outcome.TAKEN_BACK
    assert impatient.state("b") is AttemptState.CLAIMED


def test_an_attempt_is_taken_back_before_its_job_is_published(impatient):
    assert impatient.tick(12.5) == TAKEN_BACK
    assert impatient.published("a", 9) == [DeleteJob(9)]


def test_what_is_claimed_is_never_taken_back(impatient):
    assert impatient.claim("a", WRITER, now=12.4) is None
    assert impatient.tick(20.0) == []
    impatient.writer_gone(WRITER, now=20.0)
    assert impatient.tick(20.5) == []
    assert impatient.state("a") is AttemptState.CLAIMED
    impatient.request_finished("r")
    assert impatient.tick(20.6) == []
    assert impatient.state("a") is AttemptState.QUARANTINED


def test_a_request_whose_time_is_up_has_reached_its_deadline(empty):
    empty.allocated("r", "a", BLOCKS, deadline=12.0, queued_at=10.0, max_queue_wait_s=2.0)
    assert empty.tick(12.0) == withdrawn(Outcome.DEADLINE)


def test_a_worker_whose_claim_never_arrived_may_give_the_job_back(queued):
    assert queued.writer_done("a", WRITER, written=False) == [
        DeleteJob(9),
        *withdrawn(Outcome.WRITER_FAILED),
    ]


def test_nobody_can_have_written_a_queued_attempt(queued):
    assert queued.writer_done("a", WRITER, written=True) == []
    assert queued.state("a") is AttemptState.QUEUED


# claim


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_end_of_an_earlier_claim_frees_nothing_that_a_later_one_holds(queued, cancelled):
    """The job came again to the same writer, and its words overtake each other."""
    assert queued.claim("a", WRITER, now=1.0, number=4) is None
    assert queued.claim("a", WRITER, now=2.0, number=5) is None
    assert queued.claim("a", WRITER, now=2.0, number=4) == Refusal("claimed again since")
    if cancelled:
        queued.request_finished("r")
    state = queued.state("a")
    assert queued.writer_done("a", WRITER, written=False, number=4) == []
    assert queued.state("a") is state
    assert queued.writer_done("a", WRITER, written=False, number=5) != []


def test_each_claim_has_one_grant_for_the_blocks_of_its_job(queued):
    queued.offered("a", b"digest")
    queued.offered("unknown", b"digest")
    assert queued.claim("a", WRITER, now=1.0, number=4, grant=70) is None
    assert queued.granted("a", now=1.0) == Terms(70, b"digest", 99.0)
    # The answer was lost.
    assert queued.claim("a", WRITER, now=3.0, number=4, grant=71) is None
    assert queued.granted("a", now=3.0) == Terms(70, b"digest", 97.0)
    assert queued.claim("a", WRITER, now=4.0, number=5, grant=72) is None
    assert queued.granted("a", now=4.0).grant == 72
    # A refusal changes nothing.
    assert queued.claim("a", OTHER, now=4.0, number=9, grant=73) is not None
    assert queued.claim("a", WRITER, now=4.0, number=4, grant=74) is not None
    assert queued.granted("a", now=101.0) == Terms(72, b"digest", 0.0)


def test_only_so_many_gone_leases_are_remembered(queued):
    for lease in range(5000):
        queued.writer_gone(lease, now=1.0)
    assert queued.claim("a", 4999, now=2.0) == GONE
    assert queued.claim("a", 0, now=2.0) is None


# CLAIMED


def test_received_but_not_intact(claimed):
    """All writers have finished: nothing is held back, and the engine computes it."""
    assert claimed.received("r", intact=False) == [Ended("r", "a", Outcome.CORRUPT)]
    assert counts(claimed) == (0, 0)
    assert claimed.writer_done("a", WRITER, written=True) == []


def test_a_writer_that_failed_leaves_nothing_to_hold(claimed):
    assert claimed.writer_done("a", WRITER, written=False) == [
        DeleteJob(9),
        *withdrawn(Outcome.WRITER_FAILED),
    ]


def test_a_writer_that_has_written_leaves_nothing_to_hold(claimed):
    assert claimed.writer_done("a", WRITER, written=True) == []
    assert claimed.request_finished("r") == [DeleteJob(9), *withdrawn(Outcome.CANCELLED)]


def test_a_lost_writer_is_given_time_until_its_fence_closes_and_for_what_it_sent(claimed):
    """Its lease may have been revoked while it was cut off."""
    claimed.writer_gone(OTHER, now=1.5)
    claimed.writer_gone(WRITER, now=2.0)
    assert claimed.tick(2.0 + LEAVING - 0.001) == []
    assert claimed.tick(2.0 + LEAVING) == held(Outcome.WRITER_LOST)
    assert Release("a") not in claimed.tick(2.0 + 2 * GRACE - 0.001)
    assert claimed.tick(2.0 + 2 * GRACE) == [Release("a")]


def test_a_writer_whose_process_ended_is_lost_at_once_and_its_engine_given_the_same_time(claimed):
    """Its requests do not wait for the end of its promise."""
    claimed.writer_stays("a", WRITER, 3.0, now=1.5)
    assert claimed.writer_gone(WRITER, now=2.0)
    claimed.writer_ended(OTHER, now=2.1)
    assert claimed.tick(2.1) == []
    claimed.writer_ended(WRITER, now=2.2)
    assert claimed.tick(2.2) == held(Outcome.WRITER_LOST)
    assert Release("a") not in claimed.tick(2.0 + 2 * GRACE - 0.001)
    assert claimed.tick(2.0 + 2 * GRACE) == [Release("a")]


def test_a_writer_whose_engine_died_is_lost_at_once_and_its_blocks_are_kept_for_two_graces(claimed):
    assert claimed.writer_died("a", OTHER, now=20.0) == []
    assert claimed.tick(20.0) == []
    assert claimed.writer_died("a", WRITER, now=20.0) == []
    assert claimed.tick(20.0) == held(Outcome.WRITER_LOST)
    assert claimed.writer_died("a", WRITER, now=22.0) == [], "it answers each cancel so"
    claimed.writer_gone(WRITER, now=22.0)
    claimed.writer_back(WRITER)
    assert Release("a") not in claimed.tick(20.0 + 2 * GRACE - 0.1)
    assert claimed.tick(20.0 + 2 * GRACE) == [Release("a")]


def test_a_writer_whose_engine_died_before_its_claim_arrived_has_written_nothing(queued):
    over = [DeleteJob(9), *withdrawn(Outcome.WRITER_FAILED)]
    assert queued.writer_died("a", WRITER, now=20.0) == over
    assert queued.writer_died("a", WRITER, now=20.0) == []


def test_a_promise_counts_only_from_the_writer_and_only_when_it_leaves(claimed):
    claimed.writer_stays("a", WRITER, 3.0, now=1.0)
    claimed.writer_stays("b", WRITER, 3.0, now=1.0)
    assert claimed.tick(50.0) == []
    claimed.writer_gone(WRITER, now=50.0)
    claimed.writer_stays("a", OTHER, 30.0, now=50.0)
    assert claimed.tick(50.0 + LEAVING) == held(Outcome.WRITER_LOST)


@pytest.mark.parametrize(
    ("attempt", "writer", "number", "why"),
    [
        ("z", WRITER, 4, "unknown or ended attempt"),
        ("q", WRITER, 4, "not claimed"),
        ("a", OTHER, 4, "claimed by a"),
        ("a", WRITER, 3, "held by claim 4, not 3"),
        ("a", WRITER, 5, "held by claim 4, not 5"),
    ],
)
@pytest.mark.parametrize("quarantined", [False, True])
def test_a_promise_for_blocks_that_are_not_held_for_its_claim_is_refused(
    queued, attempt, writer, number, why, quarantined
):
    queued.allocated("s", "q", (7,), deadline=100.0)
    queued.claim("a", WRITER, now=1.0, number=4)
    if quarantined:
        queued.request_finished("r")
    queued.writer_gone(WRITER, now=2.0)
    refusal = queued.writer_stays(attempt, writer, 3.0, now=2.5, number=number)
    assert refusal == Refusal(why)
    assert queued.writer_stays("a", WRITER, 3.0, now=2.5, number=4) is None


def test_nobody_waits_for_a_silent_writer_but_its_blocks_stay(claimed):
    claimed.allocated("s", "b", (7,), deadline=100.0)
    claimed.claim("b", OTHER, now=1.0)
    assert claimed.writer_silent(WRITER) == held(Outcome.WRITER_SILENT)
    assert claimed.writer_silent(WRITER) == []
    assert claimed.state("b") is AttemptState.CLAIMED
    assert claimed.claim("a", WRITER, now=2.0) == Refusal("withdrawn")
    assert claimed.tick(2.0 + 2 * GRACE) == []
    assert claimed.writer_done("a", WRITER, written=True) == [Release("a")]


# QUARANTINED


@pytest.mark.parametrize("written", [True, False])
def test_the_writer_s_word_releases(quarantined, written):
    assert quarantined.writer_done("a", WRITER, written=written) == [Release("a")]
    assert quarantined.writer_done("a", WRITER, written=written) == []


def test_a_gone_writer_releases_after_the_grace(quarantined):
    quarantined.writer_gone(WRITER, now=5.0)
    assert Release("a") not in quarantined.tick(5.0 + 2 * GRACE - 0.001)
    assert quarantined.tick(5.0 + 2 * GRACE) == [Release("a")]


def test_time_alone_never_releases_but_the_writer_is_told_again(quarantined):
    assert quarantined.tick(10.0) == []
    assert quarantined.tick(10.0 + GRACE) == [CancelWriter(WRITER, "a")]
    assert quarantined.tick(10.0 + GRACE + 0.001) == []
    assert quarantined.tick(1e9) == [CancelWriter(WRITER, "a")]
    assert quarantined.state("a") is AttemptState.QUARANTINED


# Random lives


@dataclass
class Fact:
    """What the model knows of one attempt."""

    attempt: str
    request: str
    deadline: float
    claim_by: float
    wanted: bool = True
    writer: int | None = None
    writer_ended: bool = False
    engine_died: bool = False
    quiet_at: float | None = None  # from when on the writer, dead or leaving, counts as lost
    fence_closes: float = float("-inf")  # when it starts its last write, whatever it promises
    promised_until: float = float("-inf")
    pushing: bool = True
    held: bool = False
    released: bool = False
    endings: list[Outcome] = field(default_factory=list)

    @property
    def kept(self):
        """Its blocks are held back."""
        return self.held and not self.released

    def writable(self, now):
        """Whether a granted writer may still touch the blocks."""
        if self.writer is None or self.writer_ended:
            return False
        return self.quiet_at is None or now < max(self.quiet_at, self.fence_closes) + GRACE


#: Which attempt or writer an event is about: one of the youngest, so that events meet.
YOUNG = st.sampled_from([-1, -1, -1, -2])


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, as the network and the engine may produce them."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(writer_grace_s=GRACE, leaving_s=LEAVING)
        self.now = 0.0
        self.facts: list[Fact] = []
        self.writers = [1, 2]
        self.gone: set[int] = set()

    def fact(self, attempt):
        return next(fact for fact in self.facts if fact.attempt == attempt)

    def pick(self, which):
        return self.facts[max(which, -len(self.facts))]

    def apply(self, instructions):
        """Carries the instructions out in the model, in their order."""
        deleted: list[Fact] = []
        for instruction in instructions:
            match instruction:
                case Hold(attempt, block_ids):
                    fact = self.fact(attempt)
                    assert not fact.held and block_ids == self.blocks(attempt)
                    fact.held = True
                case Release(attempt):
                    fact = self.fact(attempt)
                    assert fact.kept and not fact.writable(self.now)
                    assert fact.writer_ended or self.now >= fact.promised_until + GRACE
                    fact.released = True
                case GiveUp(request, attempt):
                    fact = self.fact(attempt)
                    assert fact.request == request
                    assert fact.held or not fact.writable(self.now)
                case Ended(request, attempt, outcome):
                    fact = self.fact(attempt)
                    assert fact.request == request and not fact.endings
                    self.check_ending(fact, outcome)
                    fact.endings.append(outcome)
                    fact.wanted = False
                case CancelWriter(writer, attempt):
                    fact = self.fact(attempt)
                    assert fact.writer == writer and fact.kept
                case DeleteJob(sequence):
                    deleted.append(self.facts[sequence])
        assert not any(fact.wanted for fact in deleted)

    def check_ending(self, fact, outcome):
        if outcome is Outcome.TAKEN_BACK:
            assert fact.writer is None and not fact.held and self.now >= fact.claim_by
        if outcome is Outcome.WRITER_LOST:
            assert fact.quiet_at is not None and self.now >= fact.quiet_at
        if outcome is Outcome.WRITER_SILENT:
            assert fact.writer is not None and fact.held and not fact.writer_ended

    @staticmethod
    def blocks(attempt):
        number = int(attempt[1:])
        return (3 * number, 3 * number + 1)

    @rule(event=st.sampled_from(["joins", "leaves", "leaves", "nobody claims"]), whose=YOUNG)
    def membership_changes(self, event, whose):
        if event == "joins":
            self.writers.append(len(self.writers) + 1)
        elif event == "leaves":
            self.lose(self.writers[whose])
        else:
            unclaimed = [fact for fact in self.facts if fact.wanted and fact.writer is None]
            self.apply(self.ledger.withdraw_queued(Outcome.NO_WRITER))
            assert not any(fact.wanted for fact in unclaimed)

    @initialize()
    def a_first_attempt(self):
        self.allocated(30.0)

    @precondition(lambda self: sum(fact.wanted for fact in self.facts) < 2)
    @rule(seconds=st.sampled_from([0.0, 5.0, 30.0, 30.0]), wait_s=st.sampled_from([0.5, 4.0, 40.0]))
    def allocated(self, seconds, wait_s=40.0):
        number = len(self.facts)
        fact = Fact(f"a{number}", f"r{number}", self.now + seconds, self.now + wait_s)
        self.facts.append(fact)
        self.ledger.allocated(
            fact.request,
            fact.attempt,
            self.blocks(fact.attempt),
            fact.deadline,
            queued_at=self.now,
            max_queue_wait_s=wait_s,
        )

    @rule(which=YOUNG, taken=st.sampled_from([True, True, False]))
    def the_queue_answers(self, which, taken):
        fact = self.pick(which)
        if not fact.pushing:
            return
        fact.pushing = False
        if taken:
            out = self.ledger.published(fact.attempt, self.facts.index(fact))
            assert bool(out) == (not fact.wanted)
        else:
            out = self.ledger.not_published(fact.attempt)
            assert bool(out) == (fact.wanted and fact.writer is None)
        self.apply(out)

    @rule(which=YOUNG, whose=YOUNG)
    def claim(self, which, whose):
        fact, writer = self.pick(which), self.writers[whose]
        refusal = self.ledger.claim(fact.attempt, writer, self.now)
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

    @rule(which=YOUNG, written=st.booleans())
    def writer_done(self, which, written):
        """Only a writer with a granted claim sends it; the message may come twice."""
        fact = self.pick(which)
        if fact.writer is not None:
            fact.writer_ended = True
            self.apply(self.ledger.writer_done(fact.attempt, fact.writer, written=written))

    @rule(which=YOUNG, whose=YOUNG, written=st.booleans())
    def stranger_done(self, which, whose, written):
        fact, writer = self.pick(which), self.writers[whose]
        if fact.writer not in (None, writer):
            assert self.ledger.writer_done(fact.attempt, writer, written=written) == []

    @rule(whose=YOUNG)
    def writer_back(self, whose):
        """Its keys were deleted under a live lease, and it put them back."""
        writer = self.writers[whose]
        if writer not in self.gone:
            return
        self.gone.discard(writer)
        for fact in self.facts:
            if fact.writer == writer and not fact.engine_died and (fact.wanted or fact.kept):
                fact.quiet_at = None
        self.ledger.writer_back(writer)

    def lose(self, writer):
        if writer in self.gone:
            return
        self.gone.add(writer)
        for fact in self.facts:
            if fact.writer == writer and not (fact.writer_ended or fact.engine_died):
                fact.quiet_at = max(self.now + LEAVING, fact.promised_until)
                fact.fence_closes = self.now + GRACE
        waits = any(
            fact.writer == writer and not fact.writer_ended and (fact.wanted or fact.kept)
            for fact in self.facts
        )
        assert self.ledger.writer_gone(writer, self.now) == waits

    @rule(whose=YOUNG)
    def writer_ended(self, whose):
        """Its process is known to have ended: only its sent writes are waited for."""
        writer = self.writers[whose]
        self.lose(writer)
        for fact in self.facts:
            if fact.writer == writer and not fact.writer_ended:
                fact.quiet_at = self.now
                fact.fence_closes = max(fact.fence_closes, fact.promised_until)
        self.ledger.writer_ended(writer, self.now)

    @rule(which=YOUNG)
    def engine_died(self, which):
        """The writer says so, perhaps again. Processes of the engine may live on until its fence
        closes."""
        fact = self.pick(which)
        if fact.writer is None or fact.writer_ended or not (fact.wanted or fact.kept):
            return
        if not fact.engine_died:
            fact.engine_died = True
            fact.quiet_at, fact.fence_closes = self.now, self.now + GRACE
        self.apply(self.ledger.writer_died(fact.attempt, fact.writer, self.now))

    @rule(whose=YOUNG)
    def writer_silent(self, whose):
        """It may be alive and write, but its attempt is not waited for any more."""
        writer = self.writers[whose]
        theirs = [
            fact
            for fact in self.facts
            if fact.wanted and fact.writer == writer and not fact.writer_ended
        ]
        self.apply(self.ledger.writer_silent(writer))
        assert all(fact.held and not fact.wanted for fact in theirs)

    @rule(which=YOUNG, seconds=st.sampled_from([0.5, 3.0]))
    def writer_stays(self, which, seconds):
        """A yes must mean that the blocks are its own, until it is silent for long."""
        fact = self.pick(which)
        if fact.writer is None:
            return
        refusal = self.ledger.writer_stays(fact.attempt, fact.writer, seconds, self.now)
        theirs = fact.wanted or fact.kept
        assert (refusal is None) == theirs, refusal
        if theirs and not fact.writer_ended:
            fact.promised_until = self.now + seconds
            if fact.writer in self.gone:
                fact.quiet_at = fact.promised_until

    @rule(which=YOUNG)
    def received(self, which):
        """Notices come from a granted writer only, and perhaps too late."""
        fact = self.pick(which)
        if fact.writer is not None:
            out = self.ledger.received(fact.request)
            assert [ended.outcome for ended in out] == [Outcome.COMMITTED] * fact.wanted
            self.apply(out)

    @rule(which=YOUNG)
    def request_finished(self, which):
        fact = self.pick(which)
        out = self.ledger.request_finished(fact.request)
        assert bool(out) == fact.wanted
        self.apply(out)

    @rule(seconds=st.sampled_from([0.0, 0.5, LEAVING, 3.0, GRACE - 0.5, GRACE]))
    def tick(self, seconds):
        self.now += seconds
        self.apply(self.ledger.tick(self.now))
        waiting = [fact for fact in self.facts if fact.wanted]
        assert not any(self.now >= fact.deadline for fact in waiting)
        assert not any(fact.writer is None and self.now >= fact.claim_by for fact in waiting)

    @invariant()
    def books_agree(self):
        assert self.ledger.waiting == sum(fact.wanted for fact in self.facts)
        assert self.ledger.quarantined == sum(fact.kept for fact in self.facts)
        assert all(len(fact.endings) == (not fact.wanted) for fact in self.facts)

    def teardown(self):
        """Deadlines pass, every writer leaves: nothing remains."""
        self.now += 100.0
        self.apply(self.ledger.tick(self.now))
        for writer in self.writers:
            self.lose(writer)
        self.now += 2 * GRACE
        self.apply(self.ledger.tick(self.now))
        assert repr(self.ledger) == "<Ledger empty>"
        assert all(len(fact.endings) == 1 for fact in self.facts)
        assert all(fact.held == fact.released for fact in self.facts)


TestLedgerLives = LedgerMachine.TestCase
# No shrinking: the steps read well enough, and shrinking them takes minutes.
TestLedgerLives.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
