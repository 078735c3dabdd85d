"""What the requests of a Frontend cost the workers that run them, measured and estimated."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dynamo_lite.policy.scaling.drain import Pace, RunningRequest, busy_s
from dynamo_lite.policy.scaling.request_pace import RequestPace
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.request_plane.migrating_request import MigratingRequest

#: A request's pace is measured from this many tokens on.
_FEW_TOKENS = 4
#: Prefix cache hits are summed over the last `_PERIODS` periods of this length.
_PERIOD_S = 60.0
_PERIODS = 10


class _Sampling(msgspec.Struct):
    """The only sampling parameter that is read here."""

    max_tokens: int | None = None


_decode_sampling = msgspec.msgpack.Decoder(_Sampling).decode


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """What one Frontend's requests cost one worker."""

    requests: int = 0
    #: How many of these requests are migrating because this worker leaves.
    moving: int = 0
    #: Seconds until each request is finished, or migrated where that is cheaper; None: not known.
    busy_s: float | None = 0.0
    #: Seconds of computing that its prefix cache has saved in the last ten minutes; 0 if not
    #: known.
    cache_s: float = 0.0


class FlightCosts:
    """Measures the requests as they run. Needs a running event loop."""

    def __init__(self) -> None:
        self._measured = RequestPace()
        #: Prompt tokens found in a worker's prefix cache, by lease id and number of the period.
        self._hits: Counter[tuple[int, int]] = Counter()

    @property
    def pace(self) -> Pace:
        return self._measured.pace

    def first(self, flight: MigratingRequest, delta: TokenDelta) -> None:
        """The first delta of an attempt was taken."""
        counts, now = delta.prefill, asyncio.get_running_loop().time()
        flight.first_delta(now)
        if counts is None:
            return
        self._measured.first(
            counts.prompt_tokens - counts.local_cached_tokens, now - flight.began_at
        )
        if counts.local_cached_tokens and flight.member is not None:
            period = int(now / _PERIOD_S)
            if (flight.member.lease_id, period) not in self._hits:
                self._forget_hits(period)
            self._hits[flight.member.lease_id, period] += counts.local_cached_tokens

    def ended(self, flight: MigratingRequest) -> None:
        now = asyncio.get_running_loop().time()
        self._measured.ended(flight.output_tokens, flight.decoded_tokens, now - flight.first_at)

    def loads(self, flights: Iterable[MigratingRequest]) -> dict[int, WorkerLoad]:
        """Returns the load by lease id; workers without requests and hits are left out."""
        now = asyncio.get_running_loop().time()
        self._forget_hits(int(now / _PERIOD_S))
        at: dict[int, list[MigratingRequest]] = {lease_id: [] for lease_id, _ in self._hits}
        for flight in flights:
            member = flight.member if flight.held is None else flight.held.member
            if member is not None:
                at.setdefault(member.lease_id, []).append(flight)
        pace = self.pace
        return {lease_id: self._load(lease_id, here, pace, now) for lease_id, here in at.items()}

    def _load(
        self, lease_id: int, flights: list[MigratingRequest], pace: Pace, now: float
    ) -> WorkerLoad:
        hits = sum(tokens for (lease, _), tokens in self._hits.items() if lease == lease_id)
        return WorkerLoad(
            requests=len(flights),
            moving=sum(flight.held is not None for flight in flights),
            busy_s=busy_s([running(flight, now) for flight in flights], pace),
            cache_s=hits / pace.prefill_tokens_per_s if pace.prefill_tokens_per_s else 0.0,
        )

    def _forget_hits(self, period: int) -> None:
        for lease_id, counted in list(self._hits):
            if counted <= period - _PERIODS:
                del self._hits[lease_id, counted]


def running(flight: MigratingRequest, now: float) -> RunningRequest:
    """The request as `policy/scaling/drain.py` sees it. now: by the event loop's clock."""
    decoded = flight.decoded_tokens
    return RunningRequest(
        prompt_tokens=len(flight.request.prompt_token_ids),
        output_tokens=flight.output_tokens,
        limit_tokens=_limit_of(flight.request),
        how=flight.move_kind,
        token_s=(now - flight.first_at) / decoded if decoded >= _FEW_TOKENS else None,
    )


def _limit_of(request: GenerateRequest) -> int | None:
    try:
        return _decode_sampling(request.sampling).max_tokens
    except msgspec.DecodeError:
        return None
