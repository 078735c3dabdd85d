"""The interface of the prefill queue.

`jetstream.py` implements it on JetStream. The simulation has others; all pass
`tests/contract/test_queue.py`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.protocol.options import NaturalOption, PositiveOption

MAX_AGE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The prefill queue; every service of a graph must agree on all of them (use Common)."""

    #: Hard cap on jobs, waiting and in flight together; the broker enforces it.
    max_jobs: PositiveOption = 64
    #: A job with at most this many tokens to compute is short, and goes before others
    #: (`disagg/decision/lanes.py`).
    short_length: NaturalOption = 2048
    #: At least this many servers of a NATS cluster store the queue. With 3 it survives the loss of
    #: one server, with 5 the loss of two.
    replicas: Literal[1, 3, 5] = 1
    #: Where the servers store the queue. In a file it survives a restart of all servers.
    storage: Literal["memory", "file"] = "memory"


@dataclass(frozen=True, kw_only=True)
class QueueConfig(QueueOptions):
    """The options and what users cannot change."""

    #: How long a push waits for the broker's answer. Only this value may differ between users.
    push_timeout_s: float = 0.5
    #: The broker drops older jobs, pulled or not. Otherwise jobs of dead engines, and jobs with an
    #: ambiguous push, would count against `max_jobs` forever.
    max_age_s: float = MAX_AGE_S

    @classmethod
    def of(cls, options: QueueOptions) -> Self:
        return cls(**vars(options))


def single_server_text(replicas: int) -> str:
    """Why that many replicas are refused by a NATS server that is not in a cluster."""
    return (
        f"queue.replicas is {replicas}, and NATS is a single server, not a cluster; name the"
        f" servers of a cluster of at least {replicas} with --nats-url, or set queue.replicas to 1"
    )


@dataclass(frozen=True)
class QueueDepth:
    """A reading of the queue."""

    #: Waiting and in flight: each counts until it is acknowledged, deleted or too old.
    jobs: int
    #: Their bytes, as the broker stores them.
    size: int


@dataclass(eq=False)
class Job:
    """A pulled job. No worker gets it again."""

    payload: bytes
    sequence: int
    #: To be called when the job is over: removes it from the queue. Raises BrokerUnavailable and
    #: nothing else. Then the job may stay on the queue, where it counts, until its decode engine
    #: deletes it, or for `max_age_s`.
    ack: Callable[[], Awaitable[None]]


class PrefillQueue(Protocol):
    """An async context manager.

    Entering raises StartupError when the broker cannot be used, or has the queue with another
    configuration. A queue that the broker has lost is made again, empty, with other sequences. A
    cluster may make one that was in the memory of a lost server again by itself, with the same.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def push(
        self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG, life_s: float = MAX_AGE_S
    ) -> int:
        """Returns the job's sequence. A repeated `message_id` queues nothing new. life_s: how long
        the broker keeps the job, pulled or not, in whole seconds.

        Raises QueueFull or BrokerUnavailable. After the latter it may be queued all the same.
        """
        ...

    async def delete(self, sequence: int) -> bool:
        """Removes a job, pulled or not. Returns whether it existed.

        Raises BrokerUnavailable.
        """
        ...

    async def depth(self) -> QueueDepth:
        """Requests the depth from the broker, which is cheap. Raises BrokerUnavailable."""
        ...

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        """Returns the next job, or None after `timeout_s`.

        lanes: the lanes to pull from; earlier ones first, see `disagg/decision/lanes.py`. With
        replicas each lane shows a job some milliseconds after its push was confirmed, so that one
        of a later lane may come before it.
        May be cancelled: a job that is being delivered is kept for the next pull.
        """
        ...

    async def stop_pulling(self) -> None:
        """Pulls no further job. `pull` returns those that the broker has delivered to this user
        already, as no other user gets them, and then None."""
        ...
