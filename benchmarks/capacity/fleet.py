"""The workers of one role: starts, drains, and the device-seconds that they take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from benchmarks.capacity.events import Events


class WorkerModel(Protocol):
    """A worker of either role."""

    #: It takes nothing new.
    leaving: bool

    @property
    def busy(self) -> int:
        """How much it has to do, in its role's own unit."""
        ...

    @property
    def idle(self) -> bool: ...


W = TypeVar("W", bound=WorkerModel)


@dataclass(frozen=True)
class WorkerCounts:
    """Workers of each role."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(eq=False, slots=True)
class _Place(Generic[W]):
    """One worker from its order until it is gone."""

    ordered_at: float
    worker: W | None = None
    draining_at: float | None = None
    cancelled: bool = False


class RoleFleet(Generic[W]):
    """count: workers that are there from the beginning. make: makes a worker that is ready now.
    on_leave: called with a worker that is to take nothing new from now on."""

    def __init__(
        self,
        events: Events,
        *,
        count: int,
        start_s: float,
        make: Callable[[], W],
        on_leave: Callable[[W], None],
    ):
        self._events, self._start_s = events, start_s
        self._make, self._on_leave = make, on_leave
        self._places = [_Place(events.now, make()) for _ in range(count)]
        self._spent_s = 0.0

    @property
    def ready(self) -> list[W]:
        return [worker for _, worker in self._serving()]

    @property
    def starting_s(self) -> list[float]:
        """Seconds since the orders of those that start."""
        return [self._events.now - one.ordered_at for one in self._places if one.worker is None]

    @property
    def draining_s(self) -> list[float]:
        """Seconds since the orders to drain."""
        now = self._events.now
        return [now - one.draining_at for one in self._places if one.draining_at is not None]

    @property
    def count(self) -> int:
        """Workers that serve or will serve."""
        return sum(one.draining_at is None for one in self._places)

    @property
    def devices(self) -> int:
        """Workers that occupy a device."""
        return len(self._places)

    def device_seconds(self) -> float:
        return self._spent_s + sum(self._events.now - one.ordered_at for one in self._places)

    def want(self, count: int, room: int) -> None:
        """Starts or stops workers until `count` serve or will serve. room: how many may be
        started."""
        have = self.count
        for _ in range(min(count - have, room)):
            place = _Place[W](self._events.now)
            self._places.append(place)
            self._events.at(self._events.now + self._start_s, self._started, place)
        for _ in range(have - count):
            self._remove_one()

    def check_gone(self, worker: W) -> None:
        """To be called when the worker has finished something. One that is leaving is gone when it
        has nothing to do."""
        if worker.leaving and worker.idle:
            self._forget(next(one for one in self._places if one.worker is worker))

    def _serving(self) -> Iterator[tuple[_Place[W], W]]:
        for place in self._places:
            if place.worker is not None and place.draining_at is None:
                yield place, place.worker

    def _remove_one(self) -> None:
        """The newest that starts, or the one with the least to do; of equal ones the youngest."""
        if starting := [place for place in self._places if place.worker is None]:
            starting[-1].cancelled = True
            self._forget(starting[-1])
            return
        place, worker = min(self._serving(), key=lambda one: (one[1].busy, -one[0].ordered_at))
        place.draining_at = self._events.now
        worker.leaving = True
        self._on_leave(worker)
        self.check_gone(worker)

    def _started(self, place: _Place[W]) -> None:
        if not place.cancelled:
            place.worker = self._make()

    def _forget(self, place: _Place[W]) -> None:
        self._spent_s += self._events.now - place.ordered_at
        self._places.remove(place)
