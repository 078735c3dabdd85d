"""One run: a trace, a graph and a scaler."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.graph import GraphModel
from dynamo_lite.capacity.histogram import Histogram
from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.records import Records, Sample
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.scaling import Bounds, DecodeWorkerReport, Scaler, ScalerInputs
from dynamo_lite.capacity.timing import Timing

#: Functions between two calls of `on_progress`.
_PROGRESS_CALLS = 20_000
#: Samples over the time of the arrivals.
_SAMPLES = 240
#: Windows of rates and of the median time between two tokens, as in `overview/compose.py`.
_RATE_S, _ITL_S = 10.0, 60.0


@dataclass(frozen=True)
class ProposalChange:
    """A scaler's proposal that differs from the one before."""

    at_s: float
    wanted: WorkerCounts
    reason: str


@dataclass(eq=False)
class Result:
    """The results of a run. interrupted: it was ended before its last request."""

    name: str
    requests: Sequence[TraceRequest]
    records: Records
    graph: GraphModel
    samples: list[Sample]
    changes: list[ProposalChange]
    #: When the last request ended, or the run was interrupted.
    ended_s: float
    events: int
    interrupted: bool = False


class Run:
    """requests: in order of arrival."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        timing: Timing,
        options: GraphModelOptions,
        scaler: Scaler,
        counts: WorkerCounts,
        bounds: Bounds,
        *,
        start_s: float | None = None,
    ):
        self._requests, self._timing, self._scaler = requests, timing, scaler
        self._bounds, self._events = bounds, Events()
        self._records = Records(len(requests), self._events.stop)
        self._graph = GraphModel(
            timing,
            options,
            self._events,
            self._records,
            start_s=timing.start_s if start_s is None else start_s,
            shares_prefixes=any(request.hashes for request in requests),
        )
        self._graph.begin(counts)
        self._samples: list[Sample] = []
        self._changes: list[ProposalChange] = []
        self._wanted = counts
        self._next = 0
        self._ticked_at, self._before = 0.0, (0, 0, 0)
        #: (time, tokens of then, requests that had got memory by then)
        self._past = deque([(0.0, Histogram(), 0)])
        length = requests[-1].arrival_s if requests else 0.0
        self._sample_s = max(length / _SAMPLES, 1e-3)

    def run(self, on_progress: Callable[[int, float], None] | None = None) -> Result:
        """on_progress: called now and then with the number of ended requests and the time. A
        KeyboardInterrupt ends the run, and the result has what there is."""
        events, interrupted = self._events, False
        if self._requests:
            events.at(self._requests[0].arrival_s, self._arrive)
            events.at(0.0, self._sample)
            if self._scaler.tick_s < float("inf"):
                events.at(0.0, self._tick)
        try:
            while events.run(most=_PROGRESS_CALLS):
                if on_progress is not None:
                    on_progress(self._records.completed + self._records.refused, events.now)
        except KeyboardInterrupt:
            interrupted = True
        return Result(
            self._scaler.name,
            self._requests,
            self._records,
            self._graph,
            self._samples,
            self._changes,
            events.now,
            events.done,
            interrupted,
        )

    def _arrive(self, _: None) -> None:
        request = self._requests[self._next]
        self._next += 1
        self._records.arrived += 1
        if self._next < len(self._requests):
            self._events.at(self._requests[self._next].arrival_s, self._arrive)
        self._graph.submit(self._next - 1, request)

    def _sample(self, _: None) -> None:
        graph = self._graph
        prefill, decode = graph.prefill.seen(), graph.decode.seen()
        workers = graph.decode.ready
        used = sum(worker.engine.pool.usage for worker in workers)
        self._samples.append(
            Sample(
                self._events.now,
                prefill.ready,
                decode.ready,
                len(prefill.starting_ages_s) + len(decode.starting_ages_s),
                len(prefill.draining_ages_s) + len(decode.draining_ages_s),
                graph.backlog.queue.jobs,
                graph.in_flight,
                used / len(workers) if workers else 0.0,
            )
        )
        self._events.at(self._events.now + self._sample_s, self._sample)

    def _tick(self, _: None) -> None:
        now = self._events.now
        proposal = self._scaler.tick(self._seen(), now)
        wanted = self._bounds.clipped(proposal.wanted.prefill, proposal.wanted.decode)
        if wanted != self._wanted:
            self._changes.append(ProposalChange(now, wanted, proposal.reason))
            self._wanted = wanted
        self._graph.want(wanted, self._bounds.most)
        self._events.at(now + self._scaler.tick_s, self._tick)

    def _seen(self) -> ScalerInputs:
        graph, now, queue = self._graph, self._events.now, self._graph.backlog.queue
        tally, workers = graph.tally, graph.decode.ready
        arrived = self._requests[self._before[0] : self._next]
        asked, refused = tally.remote_tokens, tally.unserved_tokens
        since_s = now - self._ticked_at
        recent, lately = self._since(now - _RATE_S), self._since(now - _ITL_S)
        self._past.append((now, tally.gaps.copy(), tally.decisions.total()))
        before, self._before = self._before, (self._next, asked, refused)
        self._ticked_at = now
        return ScalerInputs(
            prefill=graph.prefill.seen(),
            decode=graph.decode.seen(),
            since_s=since_s,
            requests=len(arrived),
            prompt_tokens=sum(request.prompt_tokens for request in arrived),
            asked_tokens=asked - before[1],
            refused_tokens=refused - before[2],
            backlog_jobs=queue.jobs,
            backlog_tokens=queue.tokens,
            prefill_tokens_per_s=graph.backlog.drain.tokens_per_s(now),
            kv_tokens=self._timing.engine.kv_tokens,
            kv_used_tokens=sum(worker.engine.pool.used for worker in workers),
            kv_parked_tokens=sum(worker.parked_tokens for worker in workers),
            running=sum(worker.running for worker in workers),
            waiting=sum(len(worker.engine.waiting) for worker in workers),
            waiting_tokens=sum(one.context for w in workers for one in w.engine.waiting),
            max_num_seqs=self._timing.engine.max_num_seqs,
            itl_s=lately.gaps.percentile(0.5),
            admitted_per_s=recent.admitted / recent.seconds if recent.seconds else None,
            tokens_per_s=recent.gaps.weight / recent.seconds if recent.seconds else None,
            token_s=recent.gaps.mean_s,
            decode_workers=tuple(
                DecodeWorkerReport(
                    running=worker.running,
                    waiting=worker.in_flight - worker.running,
                    kv_usage=worker.engine.pool.usage,
                    kv_tokens=worker.engine.pool.tokens,
                )
                for worker in workers
            ),
        )

    def _since(self, at: float) -> "_Recent":
        """Since the first look that is not older; what is older than all windows is forgotten."""
        now, tally, past = self._events.now, self._graph.tally, self._past
        while len(past) > 1 and past[0][0] < now - _ITL_S:
            past.popleft()
        began, gaps, admitted = next((one for one in past if one[0] >= at - 1e-6), past[-1])
        return _Recent(now - began, tally.gaps.since(gaps), tally.decisions.total() - admitted)


@dataclass(frozen=True)
class _Recent:
    """Counts of the last seconds."""

    seconds: float
    gaps: Histogram
    admitted: int
