"""Which tokens an engine computes next: vLLM's scheduling rules, as far as KV connectors see them.

Running requests come first, then waiting ones in order; prompts go in chunks
under a token budget; full blocks are shared by their prefix. A prompt whose KV
comes from elsewhere holds its blocks, and waits. When blocks run out the last
running request loses its own, and is computed again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_lite.disagg.messages import RankResults
from tests.simulation.engine.model import Block, BlockPool, SimRequest, SimRequestStatus

if TYPE_CHECKING:
    from tests.simulation.engine.halves import DecodeHalves, PrefillHalves


@dataclass
class StepPlan:
    """One step."""

    #: Request id to tokens to compute.
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict[str, int])
    preempted: list[str] = field(default_factory=list[str])
    #: Blocks that the step completes.
    filling: list[int] = field(default_factory=list[int])
    #: The connector's message to its rank.
    step: Any = None

    @property
    def tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class SimScheduler:
    """budget_tokens: of one step. max_running: sequences computed at a time."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        connector: "DecodeHalves | PrefillHalves",
        *,
        budget_tokens: int,
        max_running: int,
    ):
        self.pool, self._size, self._connector = pool, block_size, connector
        self._budget, self._max_running = budget_tokens, max_running
        self.requests: dict[str, SimRequest] = {}
        self._running: list[SimRequest] = []
        self._waiting: deque[SimRequest] = deque()
        self._holding: list[SimRequest] = []  # parked now or a moment ago
        self._arrived: set[str] = set()
        self._failed: set[str] = set()
        self._unreported_end = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._holding)

    @property
    def has_work(self) -> bool:
        """Whether requests are computed, wait, or have blocks in use; also for one step after each
        end, which reports it."""
        return bool(self.requests) or self._unreported_end or self._connector.busy

    def waiting_for_kv(self) -> list[SimRequest]:
        return [request for request in self._holding if self._waits_for_kv(request)]

    def _waits_for_kv(self, request: SimRequest) -> bool:
        parked = request.status is SimRequestStatus.PARKED
        return parked and request.request_id not in self._arrived

    def add(self, request: SimRequest) -> None:
        self.requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.status is SimRequestStatus.FINISHED:
                continue
            if request.status is SimRequestStatus.RUNNING:
                self._running.remove(request)
            elif request in self._holding:
                self._holding.remove(request)
            else:
                self._waiting.remove(request)
            parked = self._waits_for_kv(request)
            self._arrived.discard(request_id)
            self._failed.discard(request_id)
            self._finish(request, parked=parked)

    def cache(self, request: SimRequest, tokens: int, *, start: int = 0) -> None:
        """Shares the blocks of the request's first `tokens` tokens from now on.

        start: those of the tokens before it are shared already.
        """
        for index in range(start // self._size, tokens // self._size):
            self.pool.cache(request.blocks[index], request.states[(index + 1) * self._size - 1])

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan()
        self._unreported_end = False
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan, now)
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens // self._size
            end = (request.num_computed_tokens + count) // self._size
            plan.filling += request.block_ids[start:end]
        plan.step = self._connector.build_step(plan)
        for request_id, count in plan.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return plan

    def apply_results(self, results: RankResults, report: Any) -> None:
        """Takes over what the rank has received, lost and sent."""
        for request_id in sorted(results.lost):
            request = self.requests.get(request_id)
            if request is not None and request.status is SimRequestStatus.PARKED:
                request.num_computed_tokens = 0
                self._failed.add(request_id)
        if results.received or results.lost or results.sent or report:
            self._connector.worker_output(results, report)
        for request_id in sorted(results.received | results.lost):
            if self.requests[request_id].status is SimRequestStatus.PARKED:
                self._arrived.add(request_id)
            else:
                self._free(self.requests[request_id])
        for request_id in sorted(results.sent):
            self._free(self.requests[request_id])

    def finish(self, request: SimRequest) -> None:
        """It was running, and has its last token."""
        self._running.remove(request)
        self._finish(request, parked=False)

    def _finish(self, request: SimRequest, *, parked: bool) -> None:
        request.status = SimRequestStatus.FINISHED
        self._unreported_end = True
        sending = self._connector.finished(request)
        if not (parked or sending):
            self._free(request)

    def _free(self, request: SimRequest) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: SimRequest) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks = []

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in list(self._running):
            if request not in self._running:
                continue  # it lost its blocks to an earlier request
            count = min(
                request.num_tokens - request.num_computed_tokens, self._budget - plan.tokens
            )
            if count <= 0:
                continue
            while not self._reserve(request, request.num_computed_tokens + count):
                victim = self._running.pop()
                self._preempt(victim, plan)
                if victim is request:
                    break
            else:
                plan.num_scheduled_tokens[request.request_id] = count

    def _preempt(self, request: SimRequest, plan: StepPlan) -> None:
        plan.num_scheduled_tokens.pop(request.request_id, None)
        plan.preempted.append(request.request_id)
        self._release(request)
        request.num_computed_tokens = 0
        request.status = SimRequestStatus.WAITING
        self._waiting.appendleft(request)

    def _schedule_waiting(self, plan: StepPlan, now: float) -> None:
        """First the requests that hold blocks, or did so until their KV was lost, in order."""
        if not self._schedule_holding(plan, now):
            return
        deferred: list[SimRequest] = []
        while self._waiting and self._may_run(plan):
            request = self._waiting[0]
            admitted = self._admit(request, plan, now)
            if admitted is False:
                break
            self._waiting.popleft()
            if admitted is None:
                deferred.append(request)
            elif request.status is SimRequestStatus.PARKED:
                self._holding.append(request)
        self._waiting.extendleft(reversed(deferred))

    def _schedule_holding(self, plan: StepPlan, now: float) -> bool:
        """Returns whether others may follow."""
        for request in list(self._holding):
            if request.status is SimRequestStatus.PARKED:
                if request.request_id not in self._arrived:
                    continue
                self._unpark(request)
            admitted = self._admit(request, plan, now) if self._may_run(plan) else False
            if admitted is False:
                return False
            if admitted and request.status is not SimRequestStatus.PARKED:
                self._holding.remove(request)
        return True

    def _may_run(self, plan: StepPlan) -> bool:
        """Whether this step has room for another request."""
        return plan.tokens < self._budget and len(self._running) < self._max_running

    def _unpark(self, request: SimRequest) -> None:
        """Its KV came, or will not come: it can be scheduled."""
        self._arrived.discard(request.request_id)
        request.status = SimRequestStatus.WAITING
        if request.request_id in self._failed:
            self._failed.discard(request.request_id)
            self._release(request)
        else:
            self.cache(request, request.num_computed_tokens)

    def _admit(self, request: SimRequest, plan: StepPlan, now: float) -> bool | None:
        """Whether it is computed or parked now. None: not decided yet, others may go first."""
        cached = external = 0
        park = False
        fresh = request.num_computed_tokens == 0
        if fresh:
            known = self._cached_prefix(request)
            cached = len(known) * self._size
            matched, park = self._connector.matched(request, cached)
            if matched is None:
                return None
            external = matched
            self.pool.touch(known)
            request.blocks = known
        computed = cached + external if fresh else request.num_computed_tokens
        count = 0 if park else min(request.num_tokens - computed, self._budget - plan.tokens)
        # The blocks of the whole sequence must be free, or it would only be preempted.
        wanted = -(-request.num_tokens // self._size) - len(request.blocks)
        if wanted > self.pool.get_num_free_blocks() or not self._reserve(
            request, computed + count, cache=not park
        ):
            if fresh:
                self._release(request)
            return False
        self._connector.allocated(request, external)
        request.num_computed_tokens = computed
        if fresh and not request.output_token_ids:
            request.cached_tokens, request.external_tokens = cached, external
            request.waited_s = now - request.arrived
        if park:
            request.status, request.parked_at = SimRequestStatus.PARKED, now
            return True
        request.status = SimRequestStatus.RUNNING
        self._running.append(request)
        plan.num_scheduled_tokens[request.request_id] = count
        return True

    def _cached_prefix(self, request: SimRequest) -> list[Block]:
        """All but the last token may come from the cache."""
        size, states = self._size, request.states
        return self.pool.find(states[end - 1] for end in range(size, request.num_tokens, size))

    def _reserve(self, request: SimRequest, tokens: int, *, cache: bool = True) -> bool:
        """Blocks for the first `tokens` tokens; the full ones are shared from now on."""
        wanted = -(-tokens // self._size) - len(request.blocks)
        if wanted > 0:
            new = self.pool.allocate(wanted)
            if new is None:
                return False
            request.blocks = request.blocks + new
        if cache:
            self.cache(request, tokens, start=request.num_computed_tokens)
        return True
