"""The workers of both roles: starts, drains, and the device-seconds that they take."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.scaling import RoleWorkers
from dynamo_lite.policy.scaling.drain import DrainCandidate, NoVictim, victim

W = TypeVar("W")


@dataclass(eq=False, slots=True)
class _Place(Generic[W]):
    """One worker from its order until it is gone."""

    ordered_at: float
    worker: W | None = None
    ready_at: float | None = None
    draining_at: float | None = None
    cancelled: bool = False


class RoleFleet(Generic[W]):
    """The workers of one role.

    make: makes a worker that is ready now. stop: tells one to take nothing new; it calls `gone`.
    busy_s: how long a worker needs to finish what it has; None: not known. The shipped policy
    chooses which one is stopped.
    """

    def __init__(
        self,
        events: Events,
        *,
        start_s: float,
        make: Callable[[], W],
        stop: Callable[[W], None],
        busy_s: Callable[[W], float | None],
    ):
        self._events, self._start_s = events, start_s
        self._make, self._stop, self._busy_s = make, stop, busy_s
        self._places: list[_Place[W]] = []
        self._spent_s = 0.0
        self.starts = self.stops = 0

    def begin(self, count: int) -> None:
        """These are ready from the beginning."""
        for _ in range(count):
            place = _Place[W](self._events.now, self._make())
            self._places.append(place)

    @property
    def ready(self) -> list[W]:
        return [
            place.worker
            for place in self._places
            if place.worker is not None and place.draining_at is None
        ]

    @property
    def devices(self) -> int:
        """Number of workers that occupy a device."""
        return len(self._places)

    def device_seconds(self) -> float:
        return self._spent_s + sum(self._events.now - place.ordered_at for place in self._places)

    def seen(self) -> RoleWorkers:
        now = self._events.now
        readied = [
            place.ready_at
            for place in self._places
            if place.ready_at is not None and place.draining_at is None
        ]
        return RoleWorkers(
            ready=len(self.ready),
            starting_ages_s=tuple(now - p.ordered_at for p in self._places if p.worker is None),
            draining_ages_s=tuple(
                now - p.draining_at for p in self._places if p.draining_at is not None
            ),
            youngest_s=now - max(readied) if readied else None,
        )

    def want(self, count: int, room: int) -> None:
        """Starts or stops workers until `count` serve or will serve. room: how many may be
        started."""
        have = self.seen().count
        for _ in range(min(count - have, room)):
            place = _Place[W](self._events.now)
            self._places.append(place)
            self.starts += 1
            self._events.at(self._events.now + self._start_s, self._started, place)
        for _ in range(have - count):
            self._remove_one()

    def gone(self, worker: W) -> None:
        """A stopped worker has finished."""
        for place in self._places:
            if place.worker is worker:
                self._forget(place)
                return

    def _remove_one(self) -> None:
        starting = [place for place in self._places if place.worker is None]
        self.stops += 1
        if starting:
            starting[-1].cancelled = True
            self._forget(starting[-1])
            return
        serving = {
            number: place
            for number, place in enumerate(self._places)
            if place.worker is not None and place.draining_at is None
        }
        chosen = victim([self._candidate(*one) for one in serving.items()], force=True)
        assert not isinstance(chosen, NoVictim)
        place = serving[chosen.lease_id]
        assert place.worker is not None
        place.draining_at = self._events.now
        self._stop(place.worker)

    def _candidate(self, number: int, place: "_Place[W]") -> DrainCandidate:
        assert place.worker is not None
        return DrainCandidate(
            lease_id=number, busy_s=self._busy_s(place.worker), started_at=place.ordered_at
        )

    def _started(self, place: "_Place[W]") -> None:
        if not place.cancelled:
            place.worker = self._make()
            place.ready_at = self._events.now

    def _forget(self, place: "_Place[W]") -> None:
        self._spent_s += self._events.now - place.ordered_at
        self._places.remove(place)


def phases(seed: int, period_s: float) -> Callable[[], float]:
    """Draws the time in a period at which each worker reports."""
    uniform = random.Random(seed).random
    return lambda: uniform() * period_s
