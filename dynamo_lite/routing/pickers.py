"""Which decode worker takes a request: pickers over the live members.

A picker keeps no membership: it gets the members with each call, and those of them that were tried
already.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord


@dataclass(frozen=True)
class Selection:
    """The chosen member and why, for logs."""

    member: EndpointRecord
    reason: str


class Picker(ABC):
    """Its callers report what happens to the requests that it has placed, by their own ids."""

    @abstractmethod
    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection | Awaitable[Selection]:
        """Places the request; a cancelled wait places nothing. Raises NoWorkers when there is no
        candidate.

        without: lease ids of members that are no candidates.
        """

    def answered(self, request_id: str) -> None:  # noqa: B027
        """The request's first token has arrived."""

    def released(self, request_id: str) -> None:  # noqa: B027
        """The request has ended, or was not accepted. Unknown ids are ignored."""


class RoundRobin(Picker):
    """Takes members in the order of their lease ids.

    It remembers the last lease id, not a position: members that join or leave
    do not make it skip or repeat the others.
    """

    def __init__(self) -> None:
        self._last = -1

    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        able = (member for member in members if member.lease_id not in without)
        chosen = min(able, key=lambda m: (m.lease_id <= self._last, m.lease_id), default=None)
        if chosen is None:
            raise NoWorkers("no live worker")
        self._last = chosen.lease_id
        return Selection(chosen, f"round-robin among {len(members)}")


class Random(Picker):
    """Takes any member with equal probability.

    below: `below(n)` is uniform in 0..n-1 (`random.Random.randrange`).
    """

    def __init__(self, below: Callable[[int], int]):
        self._below = below

    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        if without:
            members = [member for member in members if member.lease_id not in without]
        if not members:
            raise NoWorkers("no live worker")
        return Selection(members[self._below(len(members))], f"random among {len(members)}")
