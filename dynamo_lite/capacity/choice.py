"""Where a decode worker's prompts are prefilled, as the services decide it: by thresholds, by
thresholds with the learned costs beside them, or by the costs."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_lite.capacity.engine import EngineModel
from dynamo_lite.capacity.jobs import BacklogView, JobModel
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.phase import Phase
from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.capacity.timing import Timing
from dynamo_lite.policy.decision.cost_policy import CostPolicy, Opinion, Side, regret_s, side_of
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, Remote, Verdict, decide
from dynamo_lite.policy.decision.prefill_costs import EngineState
from dynamo_lite.policy.decision.step_time import StepLoad
from dynamo_lite.protocol.backlog import Lane


@dataclass
class ChoiceTally:
    """Results of the decisions of all decode workers.

    forced: sides that are taken whatever the policy says, by the request's name.
    """

    forced: Mapping[str, Side] = field(default_factory=dict[str, Side])
    #: Prompts that had a choice, by the side taken.
    taken: dict[str, Side] = field(default_factory=dict[str, Side])
    #: Those of them that found a job at every prefill worker, or more.
    crowded: set[str] = field(default_factory=set[str])
    #: What the costs said, with the side that the thresholds would take.
    opinions: Counter[tuple[Side, str]] = field(default_factory=Counter[tuple[Side, str]])
    #: Realised costs, and what the other side would have saved, as the engines know them.
    cost_s: float = 0.0
    regret_s: float = 0.0
    #: Time that decoding sequences spent in steps, without what prompts added to these steps.
    decoding_s: float = 0.0


@dataclass(slots=True)
class _Chosen:
    """A prompt whose first token is awaited."""

    side: Side
    at: float
    cached: int
    opinion: Opinion
    pause_s: float = 0.0


class PrefillChoices:
    """The choices of one decode worker. now: simulated seconds."""

    def __init__(
        self, timing: Timing, options: GraphModelOptions, backlog: BacklogView, tally: ChoiceTally
    ):
        self._timing, self._options = timing, options
        self._backlog, self._tally = backlog, tally
        self._policy = CostPolicy()
        self._chosen: dict[str, _Chosen] = {}
        self._learns = options.costs.prefill_policy != "thresholds"

    def verdict(
        self,
        sequence: Sequence,
        cached: int,
        lane: Lane,
        own: "deque[tuple[float, Lane, int]]",
        engine: EngineModel,
        now: float,
    ) -> Verdict:
        """own: see `BacklogView.view`."""
        uncached, thresholds = sequence.context - cached, self._options.thresholds
        queue = self._backlog.view(lane, uncached, own)
        time_left_s = thresholds.remote_prefill_timeout_s
        verdict = decide(
            prompt_tokens=sequence.context,
            cached_tokens=cached,
            queue=queue,
            thresholds=thresholds,
            now=now,
            time_left_s=time_left_s,
        )
        name = str(sequence.note)
        opinion = Opinion(None, "")
        if self._learns:
            here = self._state(engine)
            opinion = self._policy.opinion(
                uncached, cached, here, queue, thresholds, now, time_left_s
            )
            self._tally.opinions[side_of(verdict), opinion.word] += 1
            if self._options.costs.prefill_policy == "cost":
                verdict, _ = self._policy.choose(
                    verdict, opinion, name, here, self._options.costs, now
                )
                if verdict.reason is DecisionReason.EXPLORED:
                    self._policy.exploration.take(now)
        if uncached > 1 and queue.prefill_workers:
            side = self._tally.forced.get(name, side_of(verdict))
            if side != side_of(verdict):
                kind = Local if side == "local" else Remote
                verdict = kind(DecisionReason.EXPLORED)
            self._tally.taken[name] = side
            if queue.jobs >= queue.prefill_workers:
                self._tally.crowded.add(name)
        if self._learns:
            self._chosen[name] = _Chosen(side_of(verdict), now, cached, opinion)
            if side_of(verdict) == "local":
                self._policy.costs.computes_here(now)
        return verdict

    def stepped(self, phase: Phase, now: float) -> None:
        """Some steps are over."""
        load, steps = phase.mean_load(), phase.steps
        seconds = (now - phase.began) / steps
        alone_s = self._timing.step.one(streams=load.streams, kv=load.kv_tokens)
        self._tally.decoding_s += alone_s * load.streams * steps
        if not self._learns:
            return
        times = self._policy.costs.steps
        if load.prefill_tokens:
            pause_s = times.pause_s(load, seconds) * load.streams * steps
            for sequence, tokens in phase.chunks:
                if (chosen := self._chosen.get(str(sequence.note))) is not None:
                    chosen.pause_s += pause_s * tokens / load.prefill_tokens
        times.add(load, seconds, now, steps)

    def computed(self, sequence: Sequence, now: float) -> None:
        """A prompt's first token is here."""
        chosen = self._chosen.get(str(sequence.note))
        if chosen is None or chosen.side == "remote":
            return
        del self._chosen[str(sequence.note)]
        took_s = now - chosen.at
        costs = chosen.opinion.costs
        self._policy.costs.add_local(costs, took_s)
        if costs is not None:
            self._realised(chosen, took_s + chosen.pause_s + costs.behind_s)

    def received(self, job: JobModel, engine: EngineModel, now: float) -> None:
        """The KV of a remote prefill is here."""
        chosen = self._chosen.pop(str(job.sequence.note), None)
        if chosen is None:
            return
        costs, predicted = self._policy.costs, chosen.opinion.costs
        if predicted is None:
            return
        took_s = now - chosen.at + costs.steps.decode_s(StepLoad(0, 0.0, *engine.load))
        costs.add_remote(predicted, job.tokens, took_s, now)
        self._realised(chosen, took_s + predicted.queue_s + predicted.memory_s)

    def lost(self, job: JobModel, now: float) -> None:
        """A remote prefill has failed: its prompt is computed here."""
        self._chosen.pop(str(job.sequence.note), None)
        self._policy.costs.computes_here(now)

    def _realised(self, chosen: _Chosen, cost_s: float) -> None:
        if chosen.opinion.costs is None or not chosen.opinion.reliable:
            return
        self._tally.cost_s += cost_s
        self._tally.regret_s += regret_s(chosen.opinion.costs, chosen.side, cost_s)

    def _state(self, engine: EngineModel) -> EngineState:
        limits = self._timing.engine
        return EngineState(
            StepLoad(0, 0.0, *engine.load),
            engine.ahead,
            limits.max_num_batched_tokens,
            limits.kv_tokens,
            engine.pool.usage,
        )
