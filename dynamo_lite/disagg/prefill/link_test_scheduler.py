"""The scheduler half of link tests: passes orders to all ranks and collects their answers.

The bridge's thread calls `ask`, the engine's thread calls everything else.
"""

from collections import deque
from collections.abc import Mapping

from dynamo_lite.disagg.counters import PREFLIGHT, Counters
from dynamo_lite.disagg.messages import LinkTestOrder, PrefillStep, RankLink
from dynamo_lite.disagg.prefill.introductions import Introductions
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import LinkTest

#: Latest orders that are remembered. A repeated one comes within the request's timeout.
_REMEMBERED = 256


class LinkTestScheduler:
    """stats: gets the result of each order; see `LinkReport`."""

    def __init__(self, stats: Counters, introductions: Introductions):
        self._stats, self._introductions = stats, introductions
        self._asked: deque[LinkTest] = deque()
        self._taken: deque[str] = deque(maxlen=_REMEMBERED)
        self._answers: dict[str, dict[int, RankLink]] = {}

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps, even with nothing to compute."""
        return bool(self._asked or self._answers)

    def ask(self, link_test: LinkTest) -> None:
        """An order that comes twice is taken once: nobody would wake the engine for the second."""
        if link_test.order not in self._taken:
            self._taken.append(link_test.order)
            self._asked.append(link_test)

    def announce(self, step: PrefillStep) -> None:
        """Adds new orders to the step."""
        while self._asked:
            link_test = self._asked.popleft()
            engine_id = link_test.target.engine_id
            self._answers[link_test.order] = {}
            step.link_tests.append(LinkTestOrder(link_test.order, engine_id))
            # Sent again: a test must not depend on what the ranks remember.
            target = encode(link_test.target)
            self._introductions.introduce(step, engine_id, target, again=True)

    def answered(self, links: Mapping[str, Mapping[int, RankLink]], ranks: int) -> None:
        """Adds the answers of some ranks; an order ends when all `ranks` have answered."""
        for order, by_rank in links.items():
            answers = self._answers.setdefault(order, {})
            answers.update(by_rank)
            if len(answers) == ranks:
                del self._answers[order]
                self._report(order, answers)

    def _report(self, order: str, answers: Mapping[int, RankLink]) -> None:
        failures = [
            link.failure if len(answers) == 1 else f"from rank {rank}: {link.failure}"
            for rank, link in sorted(answers.items())
            if link.failure is not None
        ]
        lanes = sum(link.lanes for link in answers.values())
        contact_s = max(link.contact_s for link in answers.values())
        round_trip_s = max(link.round_trip_s for link in answers.values())
        self._stats.append(PREFLIGHT, [order, "; ".join(failures), lanes, contact_s, round_trip_s])
