"""The prefill queue: who pushes, who pulls, and what an answer means.

`jetstream.py` is the real one; `memory.py` the in-process twin. Both pass
`tests/contract/test_queue.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from dynamo_lite.policy.lanes import lane_of
from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.options import Natural, Positive, Seconds


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The prefill queue; every service of a graph must agree on all of them (use Common)."""

    #: Hard cap on jobs, waiting and in flight together; the broker enforces it.
    max_jobs: Positive = 64
    #: A job that is neither acknowledged nor extended for this long is delivered again.
    ack_wait_s: Seconds = 10.0
    #: Deliveries before a job is used up; see `Job.deliveries_left`.
    max_deliver: Positive = 3
    #: fifo, or short-first: short jobs and urgent requests before others (`policy/lanes.py`).
    order: Literal["fifo", "short-first"] = "short-first"
    #: A job with at most this many tokens to compute is short.
    short_length: Natural = 2048


@dataclass(frozen=True, kw_only=True)
class QueueConfig(QueueOptions):
    """The options and what users cannot change."""

    #: How long a push waits for the broker's answer. It alone may differ between users.
    push_timeout_s: float = 1.0
    #: The broker drops older jobs, pulled or not. Otherwise those of dead engines, and those whose
    #: push was ambiguous, would count against `max_jobs` for ever.
    max_age_s: float = 600.0

    @classmethod
    def of(cls, options: QueueOptions) -> Self:
        return cls(**vars(options))

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those that exist; one alone keeps the order of arrival."""
        return (Lane.LONG,) if self.order == "fifo" else tuple(Lane)

    def lane_of(self, tokens: int, priority: int) -> Lane:
        """Where a job of so many tokens to compute waits."""
        if self.order == "fifo":
            return Lane.LONG
        return lane_of(tokens, priority, self.short_length)


@dataclass(frozen=True)
class QueueDepth:
    """Jobs waiting to be pulled, and pulled but not yet acknowledged."""

    waiting: int
    in_flight: int

    @property
    def total(self) -> int:
        return self.waiting + self.in_flight


class Job(Protocol):
    """A pulled job. The first of ack, nak, term ends it; later ones do nothing.

    All raise BrokerUnavailable, and nothing else: the broker did not hear, and
    will deliver the job again when ack_wait is over (unless it lost the job).
    """

    @property
    def payload(self) -> bytes: ...

    @property
    def sequence(self) -> int: ...

    @property
    def deliveries(self) -> int:
        """1 at the first delivery."""
        ...

    @property
    def deliveries_left(self) -> int:
        """How many may follow this one.

        Below 0 the job is used up: whoever pulls it does not work on it, but tells
        whoever waits for it, and terminates it. Until then it is delivered again.
        """
        ...

    async def ack(self) -> None:
        """Done: the job leaves the queue."""
        ...

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Not done: deliver it again, to anybody."""
        ...

    async def term(self) -> None:
        """Never deliver it again."""
        ...

    async def extend(self) -> None:
        """Still working: restart ack_wait."""
        ...


class PrefillQueue(Protocol):
    """An async context manager; leaving it naks what was pulled and not answered.

    Entering raises StartupError when the broker cannot be used, or has the queue
    with another configuration. Sequences are never used twice, not even when
    the broker lost the queue.
    """

    @property
    def incarnation(self) -> int:
        """Grows when the broker turns out to have lost the queue, and its jobs with it:
        at the latest when it is back after an outage."""
        ...

    def on_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Calls back from the event loop after `incarnation` has grown, while the context
        lasts; perhaps in the midst of a push, which may go on into the new queue."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def push(self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG) -> int:
        """Returns the job's sequence. A repeated `message_id` queues nothing new.

        lane: one of those that the configuration has.

        Raises QueueFull or BrokerUnavailable: certainly not queued;
        PushAmbiguous: unknown.
        """
        ...

    async def delete(self, sequence: int) -> bool:
        """Removes a job, pulled or not. Returns whether it was there.

        Raises BrokerUnavailable.
        """
        ...

    async def depth(self) -> QueueDepth:
        """One cheap question to the broker. Raises BrokerUnavailable."""
        ...

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        """The next job, or None after `timeout_s`.

        lanes: those that it may be from; earlier ones first, by `policy/lanes.py`. With
        none of them in the configuration it waits for nothing, all the same.
        May be cancelled: a job that was on its way is kept for the next pull.
        """
        ...

    async def stop_pulling(self) -> None:
        """No further job will be pulled; a waiting `pull` returns None."""
        ...
