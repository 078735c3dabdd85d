"""Which decode worker takes a request: pickers over the live members.

A picker keeps no membership: it gets the members with each call, and those of them that were tried
already.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
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

        members: as long as none joins or leaves, the same tuple in each call, so that a picker
        may keep what it has made of them. without: lease ids of members that are no candidates.
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
        self._members: Sequence[EndpointRecord] = ()
        self._sorted: list[EndpointRecord] = []

    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        if members is not self._members or not isinstance(members, tuple):
            self._members, self._sorted = members, sorted(members, key=_lease_id)
        order = self._sorted
        first = bisect_right(order, self._last, key=_lease_id)
        for i in range(len(order)):
            member = order[(first + i) % len(order)]
            if member.lease_id not in without:
                self._last = member.lease_id
                return Selection(member, f"round-robin among {len(members)}")
        raise NoWorkers("no live worker")


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


def _lease_id(member: EndpointRecord) -> int:
    return member.lease_id
