"""Which decode worker takes a request: pickers over the live members.

A picker keeps no membership: it gets the candidates with each call, without members that have left
or were tried already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord


@dataclass(frozen=True)
class Selection:
    """The chosen member and why, for logs."""

    member: EndpointRecord
    reason: str


class Picker(Protocol):
    """Its callers report what happens to the requests that it has placed, by their own ids."""

    def pick(self, members: Sequence[EndpointRecord], request: GenerateRequest) -> Selection:
        """Places the request. Raises NoWorkers when `members` is empty."""
        ...

    def answered(self, request_id: str) -> None:
        """The request's first token has arrived."""
        ...

    def released(self, request_id: str) -> None:
        """The request has ended, or was not accepted. Unknown ids are ignored."""
        ...


class _Forgetful(Picker):
    """Ignores what happens to requests."""

    def answered(self, request_id: str) -> None:
        pass

    def released(self, request_id: str) -> None:
        pass


class RoundRobin(_Forgetful):
    """Takes members in the order of their lease ids.

    It remembers the last lease id, not a position: members that join or leave
    do not make it skip or repeat the others.
    """

    def __init__(self) -> None:
        self._last = -1

    def pick(self, members: Sequence[EndpointRecord], request: GenerateRequest) -> Selection:
        if not members:
            raise NoWorkers("no live worker")
        later = [member for member in members if member.lease_id > self._last]
        member = min(later or members, key=lambda member: member.lease_id)
        self._last = member.lease_id
        return Selection(member, f"round-robin among {len(members)}")


class Random(_Forgetful):
    """Takes any member with equal probability.

    below: `below(n)` is uniform in 0..n-1 (`random.Random.randrange`).
    """

    def __init__(self, below: Callable[[int], int]):
        self._below = below

    def pick(self, members: Sequence[EndpointRecord], request: GenerateRequest) -> Selection:
        if not members:
            raise NoWorkers("no live worker")
        return Selection(members[self._below(len(members))], f"random among {len(members)}")
