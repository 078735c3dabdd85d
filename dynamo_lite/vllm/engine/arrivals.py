"""A decode engine's scheduler: prompts are noticed and scheduled as soon as their KV has arrived.

After a step that computed nothing vLLM's engine sleeps for a millisecond, and notifications
are read once per step. So an arrival is noticed half a millisecond late on average, and
scheduled a millisecond after that. Here the ranks wait inside of such a step instead, where
they can look several times, and vLLM does not sleep after it.

Steps and looks keep a core busy, which slows down a prefill engine whose core is another half of
the same one. So both become rarer, the longer the prompts have been away.

Prompts that wait for the KV of another one are kept out of vLLM's steps until it has arrived.
Prompts whose KV is lost do not hold up others.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.vllm.engine.connector_types import step_of

if TYPE_CHECKING:
    from dynamo_lite.vllm.engine.connector import DynamoLiteConnector

#: How long a step waits at least, as long as vLLM would sleep.
_LEAST_S = 0.001
#: The limit. A new request that comes meanwhile waits as well.
_MOST_S = 0.005
#: Between them: the share of the time for which the prompts have been away.
_SHARE = 0.01
#: Looks in one wait. Each costs about 20 microseconds of CPU.
_LOOKS = 5
#: As short as possible: the bridge's thread waits for the interpreter by the end of it.
_HANDOVER_S = 0.00002


def schedule_arrivals_at_once(config: VllmConfig, engine_config: EngineConfig | None) -> None:
    """Sets the scheduler of a decode engine, unless the user has set another one."""
    if engine_config is None or not isinstance(engine_config.role, DecodeEngineConfig):
        return
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        made = AsyncArrivalScheduler if scheduler.async_scheduling else ArrivalScheduler
        scheduler.scheduler_cls = f"{__name__}.{made.__name__}"


def waits_in_steps(config: VllmConfig) -> bool:
    """Whether the engine's steps that compute nothing wait for KV.

    They do not where steps overlap: such engines learn of an arrival one step later anyway. Nor
    with draft models, or data-parallel ranks that share experts (other ranks count as engines of
    one), for which a step without computing matters.
    """
    return (
        config.max_concurrent_batches == 1
        and config.parallel_config.data_parallel_size == 1
        and config.speculative_config is None
        and issubclass(config.scheduler_config.get_scheduler_cls(), ArrivalScheduler)
    )


class _Waiting(RequestQueue):
    """A queue of vLLM's without the followers of parked leaders, which are kept beside it.

    In the queue each of them would cost a look-up of its whole prefix in every step, only to be
    skipped. leader_of: see `DecodeScheduler`.
    """

    def __init__(self, queue: RequestQueue, leader_of: Callable[[str], str | None]):
        self._queue, self._leader_of = queue, leader_of
        #: By leader; the last one first.
        self._followers: dict[str, list[Request]] = {}

    def bring_back(self) -> None:
        """Followers whose leader is not parked any more go on in front, in their order."""
        for leader, followers in list(self._followers.items()):
            if self._leader_of(followers[0].request_id) != leader:
                self._queue.prepend_requests(self._followers.pop(leader))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """requests: those that a step has skipped, the last one first."""
        skipped: list[Request] = []
        joined: dict[str, list[Request]] = {}
        for request in requests:
            leader = self._leader_of(request.request_id)
            (skipped if leader is None else joined.setdefault(leader, [])).append(request)
        for leader, followers in joined.items():
            self._followers[leader] = followers + self._followers.get(leader, [])
        self._queue.prepend_requests(skipped)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        self._queue.remove_requests(gone)
        for leader, followers in list(self._followers.items()):
            self._followers[leader] = [each for each in followers if each not in gone]
            if not self._followers[leader]:
                del self._followers[leader]

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def add_request(self, request: Request) -> None:
        self._queue.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._queue.prepend_request(request)

    def pop_request(self) -> Request:
        return self._queue.pop_request()

    def peek_request(self) -> Request:
        return self._queue.peek_request()

    def __bool__(self) -> bool:
        """Whether a step can look at any."""
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        for followers in self._followers.values():
            yield from reversed(followers)


class _ArrivalMixin(Scheduler):
    """vLLM's scheduler, after whose waiting steps the engine does not sleep."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        connector = cast("DynamoLiteConnector", self.connector)
        self.waiting = self._waiting = _Waiting(self.waiting, connector.leader_of)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._waiting.bring_back()
        self._let_lost_wait()
        return super().schedule(throttle_prefills)

    def _let_lost_wait(self) -> None:
        """Prompts whose KV is lost give their blocks back, and wait before the new ones.

        vLLM would keep them before prompts whose KV has arrived, which then wait, too, until there
        are blocks; and it would reserve blocks for one that is asked for again, which would need
        twice as many as it has tokens for.
        """
        if not (lost := self.failed_recving_kv_req_ids & self.finished_recving_kv_req_ids):
            return
        # One that has kept a part of its KV holds blocks.
        holding = [each for each in self.kv_holding_waiting if not each.num_computed_tokens]
        for request in reversed([each for each in holding if each.request_id in lost]):
            self.kv_holding_waiting.remove_request(request)
            self._handle_blocked_waiting_request(request)
            self._inflight_prefills.discard(request)
            self.waiting.prepend_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        step = step_of(scheduler_output.kv_connector_metadata)
        if isinstance(step, DecodeStep) and step.wait_s:
            # The engine core looks at this number next, and only to decide whether to sleep.
            scheduler_output.total_num_scheduled_tokens = 1
        return outputs


class ArrivalScheduler(_ArrivalMixin, Scheduler):
    """For engines that compute one step at a time."""


class AsyncArrivalScheduler(_ArrivalMixin, AsyncScheduler):
    """For engines that schedule the next step while one runs."""


def let_bridge_run(*, sleep: Callable[[float], None] = time.sleep) -> None:
    """Gives the interpreter to the bridge's thread, which has a job to publish. In a step that
    computes nothing the engine's thread would keep it for another 0.2 ms."""
    sleep(_HANDOVER_S)


def arrival_wait_s(away_s: float | None) -> float:
    """How long a step that computes nothing waits for KV, in seconds.

    away_s: since the last remote prefill was requested; None if no request waits for KV.
    """
    return 0.0 if away_s is None else min(max(_SHARE * away_s, _LEAST_S), _MOST_S)


def wait_for_arrival(
    rank: DecodeRank,
    wait_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when a prompt's KV has arrived, or after `wait_s`."""
    until = now() + wait_s
    while not rank.poll() and now() < until:
        sleep(wait_s / _LOOKS)
