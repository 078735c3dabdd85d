"""The ledger: each arrow of its drawing, and random lives checked against a model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_lite.disagg.attempts.ledger import (
    LEAVING_S,
    PASSED_S,
    AttemptState,
    DeleteJob,
    Ended,
    Ledger,
    Outcome,
    Release,
)
from dynamo_lite.disagg.decision.lanes import Lane

LANDING, CLAIM = 10.0, 3.0
WRITER, OTHER = 0xA, 0xB


def state(ledger: Ledger, attempt: str) -> AttemptState | None:
    entry = ledger.get(attempt)
    return None if entry is None else entry.state


def withdrawn(outcome, *, released=True, detail=""):
    """The instructions of a withdrawal. released: whether no writer may write."""
    out = [Ended("r", "a", outcome, detail), DeleteJob(9)]
    return [*out, Release("a")] if released else out


def expiring(outcome):
    return withdrawn(outcome, released=False)


@pytest.fixture
def empty():
    return Ledger(landing_s=LANDING, claim_s=CLAIM)


@pytest.fixture
def queued(empty):
    assert empty.allocated("r", "a", 100.0) == []
    assert empty.published("a", 9, Lane.LONG) == []
    return empty


@pytest.fixture
def held(queued):
    assert queued.claim("a", 71, WRITER, now=1.0) is None
    return queued


@pytest.fixture
def given_up(held):
    assert held.finished("a") == expiring(Outcome.CANCELLED)
    return held


# QUEUED


TAKEN_BACK = Ended("r", "a", Outcome.TAKEN_BACK, "no claim for 2.50 s")


@pytest.fixture
def impatient(empty):
    empty.allocated("r", "a", 100.0, queued_at=10.0, max_queue_wait_s=2.0)
    return empty


def test_a_queued_attempt_is_taken_back_and_no_writer_gets_its_claim(impatient):
    assert impatient.published("a", 9, Lane.LONG) == impatient.tick(11.999) == []
    assert impatient.next_due == 12.0
    assert impatient.tick(12.5) == [TAKEN_BACK, DeleteJob(9), Release("a")]
    assert (impatient.waiting, impatient.quarantined) == (0, 0)
    assert impatient.claim("a", 71, WRITER, now=12.5) == "unknown or ended attempt"
    assert impatient.published("a", 9, Lane.LONG) == [DeleteJob(9)]
    assert impatient.not_published("a") == []
    assert impatient.writer_done("a", 71, Outcome.WRITER_FAILED) == []


def test_an_attempt_is_kept_while_others_are_claimed(impatient):
    impatient.allocated("s", "b", 100.0, queued_at=10.0, max_queue_wait_s=2.0)
    assert impatient.claim("b", 72, WRITER, now=11.5) is None
    assert impatient.claim("c", 73, WRITER, now=13.0) == "unknown or ended attempt"
    assert impatient.claim("b", 72, WRITER, now=13.0) is None, "a renewal moves no queue"
    assert impatient.tick(13.499) == []
    over = Ended("r", "a", Outcome.TAKEN_BACK, "no claim for 3.50 s")
    assert impatient.tick(13.5) == [over, Release("a")]
    assert state(impatient, "b") is AttemptState.HELD


@pytest.mark.parametrize(("lane", "sequence", "queued_at", "lost"), [
    (Lane.LONG, 10, 0.0, True), (Lane.LONG, 8, 0.0, False), (Lane.SHORT, 10, 0.0, False),
    (Lane.LONG, 8, 1.0, True),  # its cluster has made the stream again
])  # fmt: skip
def test_a_job_that_was_delivered_before_a_claimed_one_has_lost_its_worker(
    queued, lane, sequence, queued_at, lost
):
    queued.allocated("s", "b", 200.0, queued_at=queued_at)
    queued.published("b", sequence, lane)
    queued.claim("b", 72, OTHER, now=5.0)
    queued.claim("b", 72, OTHER, now=5.9)
    assert queued.tick(5.0 + PASSED_S - 0.001) == []
    assert queued.tick(5.0 + PASSED_S) == (withdrawn(Outcome.WRITER_LOST) if lost else [])


# HELD


def test_a_claim_holds_as_long_as_it_is_renewed(held):
    for now in (1.9, 2.9, 5.5):
        assert held.tick(now) == []
        assert held.claim("a", 71, WRITER, now) is None
    assert held.next_due == 5.5 + CLAIM
    assert held.tick(5.5 + CLAIM - 0.001) == []
    assert held.tick(5.5 + CLAIM) == expiring(Outcome.WRITER_LOST)


# EXPIRING


def test_the_end_of_its_claim_and_of_its_writes_releases(given_up):
    assert given_up.writer_left(WRITER, now=2.0) == []
    assert given_up.tick(1.0 + CLAIM + LANDING - 0.001) == []
    assert given_up.tick(1.0 + CLAIM + LANDING) == [Release("a")]


# Random lives


@dataclass
class Fact:
    """What the model knows of one attempt."""

    attempt: str
    request: str
    deadline: float
    claim_by: float
    wanted: bool = True
    claim: int = 0
    #: Until when its writer may start writes, by its own clock at the latest.
    writes_until: float = float("-inf")
    writer_ended: bool = False
    pushing: bool = True
    released: bool = False
    endings: list[Outcome] = field(default_factory=list)

    def writable(self, now):
        """Whether a write may still land."""
        return bool(self.claim) and not self.writer_ended and now < self.writes_until + LANDING


#: Which attempt an event is about: one of the youngest, so that events meet.
YOUNG = st.sampled_from([-1, -1, -1, -2])


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, as the network and the engine may produce them."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(landing_s=LANDING, claim_s=CLAIM)
        self.now = 0.0
        self.facts: list[Fact] = []

    def fact(self, attempt):
        return next(fact for fact in self.facts if fact.attempt == attempt)

    def pick(self, which):
        return self.facts[max(which, -len(self.facts))]

    def apply(self, instructions):
        """Carries the instructions out in the model, in their order."""
        for instruction in instructions:
            match instruction:
                case Release(attempt):
                    fact = self.fact(attempt)
                    assert not fact.released and not fact.wanted
                    assert not fact.writable(self.now)
                    fact.released = True
                case Ended(request, attempt, outcome):
                    fact = self.fact(attempt)
                    assert fact.request == request and not fact.endings
                    if outcome is Outcome.TAKEN_BACK:
                        assert not fact.claim and self.now >= fact.claim_by
                    fact.endings.append(outcome)
                    fact.wanted = False
                case DeleteJob(sequence):
                    assert not self.facts[sequence].wanted

    @initialize()
    def a_first_attempt(self):
        self.allocated(30.0)

    @precondition(lambda self: sum(fact.wanted for fact in self.facts) < 3)
    @rule(seconds=st.sampled_from([0.0, 5.0, 30.0, 30.0]), wait_s=st.sampled_from([0.5, 4.0, 40.0]))
    def allocated(self, seconds, wait_s=40.0):
        number = len(self.facts)
        fact = Fact(f"a{number}", f"r{number}", self.now + seconds, self.now + wait_s)
        self.facts.append(fact)
        self.ledger.allocated(
            fact.request, fact.attempt, fact.deadline, queued_at=self.now, max_queue_wait_s=wait_s
        )

    @rule(which=YOUNG, taken=st.sampled_from([True, True, False]), lane=st.sampled_from(Lane))
    def the_queue_answers(self, which, taken, lane):
        fact = self.pick(which)
        if not fact.pushing:
            return
        fact.pushing = False
        if taken:
            self.apply(self.ledger.published(fact.attempt, self.facts.index(fact), lane))
        else:
            out = self.ledger.not_published(fact.attempt)
            assert bool(out) == (fact.wanted and not fact.claim)
            self.apply(out)

    @rule(which=YOUNG, claim=st.sampled_from([1, 1, 1, 2]))
    def claim(self, which, claim):
        fact = self.pick(which)
        refusal = self.ledger.claim(fact.attempt, claim, claim, self.now)
        may = (
            fact.wanted
            and self.now < fact.deadline
            and fact.claim in (0, claim)
            and not fact.writer_ended
        )
        assert (refusal is None) == may, refusal
        if may:
            fact.claim, fact.writes_until = claim, self.now + CLAIM

    @rule(which=YOUNG, outcome=st.sampled_from([None, Outcome.WRITER_FAILED]))
    def writer_done(self, which, outcome):
        """Only a writer with a claim sends it; the message may come twice."""
        fact = self.pick(which)
        if fact.claim:
            fact.writer_ended = True
            self.apply(self.ledger.writer_done(fact.attempt, fact.claim, outcome))

    @rule(which=YOUNG, claim=st.sampled_from([1, 2]))
    def stranger_done(self, which, claim):
        fact = self.pick(which)
        if fact.claim not in (0, claim):
            assert self.ledger.writer_done(fact.attempt, claim, None) == []

    @rule(writer=st.sampled_from([1, 2]), event=st.sampled_from(["left", "silent", "nobody"]))
    def membership_changes(self, writer, event):
        if event == "nobody":
            unclaimed = [fact for fact in self.facts if fact.wanted and not fact.claim]
            self.apply(self.ledger.withdraw_queued(Outcome.NO_WRITER))
            assert not any(fact.wanted for fact in unclaimed)
        elif event == "left":
            self.apply(self.ledger.writer_left(writer, self.now))
        else:
            waiting = [fact for fact in self.facts if fact.wanted]
            self.apply(self.ledger.writer_silent(writer))
            theirs = [f for f in waiting if f.claim == writer and not f.writer_ended]
            assert [fact for fact in waiting if not fact.wanted] == theirs

    @rule(which=YOUNG)
    def received(self, which):
        """Notices come from a writer only, and perhaps too late."""
        fact = self.pick(which)
        if fact.claim and fact.wanted:
            fact.wanted, fact.writer_ended = False, True
            fact.endings.append(Outcome.COMMITTED)
        if fact.claim:
            self.apply(self.ledger.received(fact.attempt))

    @rule(which=YOUNG)
    def finished(self, which):
        fact = self.pick(which)
        out = self.ledger.finished(fact.attempt)
        assert bool(out) == fact.wanted
        self.apply(out)

    @rule(seconds=st.sampled_from([0.0, LEAVING_S, PASSED_S, CLAIM, LANDING - 0.5, LANDING]))
    def tick(self, seconds):
        self.now += seconds
        self.apply(self.ledger.tick(self.now))
        waiting = [fact for fact in self.facts if fact.wanted]
        assert not any(self.now >= fact.deadline for fact in waiting)
        held = [fact for fact in waiting if fact.claim and not fact.writer_ended]
        assert not any(self.now >= fact.writes_until for fact in held)
        assert self.ledger.next_due > self.now

    @invariant()
    def books_agree(self):
        assert self.ledger.waiting == sum(fact.wanted for fact in self.facts)
        kept = [fact for fact in self.facts if not fact.wanted and not fact.released]
        assert self.ledger.quarantined == len(kept)
        assert all(len(fact.endings) == (not fact.wanted) for fact in self.facts)

    def teardown(self):
        """Time passes: nothing remains."""
        for seconds in (100.0, CLAIM + LANDING):
            self.now += seconds
            self.apply(self.ledger.tick(self.now))
        assert repr(self.ledger) == "<Ledger empty>"
        assert all(len(fact.endings) == 1 and fact.released for fact in self.facts)


TestLedgerLives = LedgerMachine.TestCase
# No shrinking: the steps read well enough, and shrinking them takes minutes.
TestLedgerLives.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
