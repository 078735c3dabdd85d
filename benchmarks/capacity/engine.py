"""One engine in time: vLLM's continuous batching with chunked prefill, several steps at once.

Between two events an engine's steps differ only by what its sequences grow. So they are one
*phase*, whose end is a formula (`phase.py`). A phase ends when a sequence ends, when a prompt is
computed, when KV memory runs out, or at the next step after something has arrived.
"""

import heapq
from collections import deque
from collections.abc import Callable

from benchmarks.capacity.events import Events
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.phase import Phase, Sequence, composed
from benchmarks.capacity.timing import Timing


class EngineModel:
    """admit: called when a waiting sequence has memory; False: its prompt is computed elsewhere,
    and `arrived` or `compute` follows. on_computed: the prompt is computed, and the first token is
    there. on_end: the last token is there. gaps: gets the times between tokens."""

    def __init__(
        self,
        timing: Timing,
        events: Events,
        *,
        admit: Callable[[Sequence], bool],
        on_computed: Callable[[Sequence], None],
        on_end: Callable[[Sequence], None],
        gaps: Histogram,
    ):
        self._timing, self._events, self._gaps = timing, events, gaps
        self._admit, self._on_computed, self._on_end = admit, on_computed, on_end
        #: KV tokens that sequences occupy.
        self.used = 0
        self.waiting: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        #: In the order in which they were admitted.
        self.running: dict[Sequence, None] = {}
        self._computing: list[Sequence] = []
        self._ends: list[tuple[int, int, Sequence]] = []
        self._streams = self._kv_tokens = self._step = self._number = 0
        #: Sequences whose next token is the second one, after a first one from elsewhere.
        self._resumed: list[Sequence] = []
        self._phase: Phase | None = None
        self._epoch = 0
        #: Whether a step is being completed or composed.
        self._between = False
        self.preemptions = 0

    @property
    def usage(self) -> float:
        return self.used / self._timing.kv_tokens

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for memory and its turn."""
        self.waiting.append(sequence)
        self._wake()

    def arrived(self, sequence: Sequence) -> None:
        """The KV of a sequence that `admit` sent elsewhere is here."""
        sequence.remote = True
        self.compute(sequence)

    def compute(self, sequence: Sequence) -> None:
        """A sequence that `admit` sent elsewhere has to be computed here."""
        self._ready.append(sequence)
        self._wake()

    def release(self, sequence: Sequence) -> None:
        """Frees the memory of a sequence that has left."""
        self._free(sequence)
        self._wake()

    def _wake(self) -> None:
        """Checks for new memory or work."""
        if self._between:
            return
        phase = self._phase
        if phase is None:
            self._begin()
            return
        if phase.chunks or len(self.running) >= self._timing.max_num_seqs:
            return
        if not self._ready and not self._next_fits():
            return
        if phase.shorten(self._events.now):
            self._schedule(phase)

    def _next_fits(self) -> bool:
        return bool(self.waiting) and self.waiting[0].context <= self._timing.kv_tokens - self.used

    def _begin(self) -> None:
        """Starts the next phase, as vLLM's scheduler composes a step."""
        self._between = True
        self._make_room()
        chunks: list[tuple[Sequence, int]] = []
        budget = self._timing.max_num_batched_tokens - self._streams
        for sequence in self._computing:
            if budget <= 0:
                break
            tokens = min(sequence.context - sequence.computed, budget)
            chunks.append((sequence, tokens))
            budget -= tokens
        joining, budget = self._start_waiting(chunks, budget)
        self._between = False
        if not self._streams and not chunks:
            self._phase = None
            return
        self._phase = phase = self._composed(chunks, joining, budget)
        self._schedule(phase)

    def _start_waiting(
        self, chunks: list[tuple[Sequence, int]], budget: int
    ) -> tuple[list[Sequence], int]:
        """Starts sequences while the step has tokens left. Returns those whose KV has come."""
        joining: list[Sequence] = []
        while budget > 0 and len(self.running) < self._timing.max_num_seqs:
            if self._ready:
                sequence = self._ready.popleft()
            elif self._next_fits():
                sequence = self.waiting.popleft()
                sequence.memory = sequence.context
                self.used += sequence.context
                if not self._admit(sequence):
                    continue
            else:
                break
            self.running[sequence] = None
            if sequence.remote:
                joining.append(sequence)
                self._join(sequence, sequence.context - 1)
                budget -= 1
                continue
            self._computing.append(sequence)
            tokens = min(sequence.context - sequence.computed, budget)
            chunks.append((sequence, tokens))
            budget -= tokens
        return joining, budget

    def _composed(
        self, chunks: list[tuple[Sequence, int]], joining: list[Sequence], budget: int
    ) -> Phase:
        steps = self._until_next_end()
        if chunks:
            sequence, count = chunks[0]
            if len(chunks) == 1 and budget == 0 and not joining:
                steps = min(steps, max((sequence.context - sequence.computed) // count, 1))
            else:
                steps = 1
        if joining or self._resumed:
            steps = 1
        if self._streams:
            steps = min(steps, max((self._timing.kv_tokens - self.used) // self._streams, 1))
        return composed(
            self._timing.step,
            self._events.now,
            steps,
            chunks,
            joining,
            streams=self._streams,
            kv_tokens=self._kv_tokens,
        )

    def _until_next_end(self) -> int:
        ends = self._ends
        while ends and ends[0][2].ends != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0] - self._step if ends else 1 << 62

    def _schedule(self, phase: Phase) -> None:
        self._epoch += 1
        self._events.at(phase.ends_at, self._end, self._epoch)

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch or self._phase is None:
            return
        phase, self._phase, self._between = self._phase, None, True
        grown = phase.streams * phase.steps
        self._step += phase.steps
        self._kv_tokens += grown
        self.used += grown
        self._note_gaps(phase)
        for sequence, tokens in phase.chunks:
            sequence.computed += tokens * phase.steps
            if sequence.computed == sequence.context:
                self._computed(sequence)
        for sequence in phase.joining:
            self._first_step(sequence)
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            number, _, sequence = heapq.heappop(ends)
            if sequence.ends == number:
                self._unjoin(sequence)
                self._leave(sequence)
        self._begin()

    def _note_gaps(self, phase: Phase) -> None:
        """All streams get a token in each step; the gap of a resumed one began elsewhere."""
        now = self._events.now
        resumed = [sequence for sequence in self._resumed if sequence in self.running]
        self._resumed = []
        for sequence in resumed:
            assert sequence.token_at is not None
            self._gaps.add(now - sequence.token_at)
            sequence.token_at = None
        streams = phase.streams - len(phase.joining) - len(resumed)
        if streams > 0:
            self._gaps.add_series(phase.first, phase.growth, phase.steps, streams)

    def _first_step(self, sequence: Sequence) -> None:
        """A sequence with KV from elsewhere has computed its last prompt token."""
        sequence.remote = False
        if sequence.first_at is None:
            sequence.first_at = self._events.now
            self._on_computed(sequence)
        elif sequence.ends > self._step:
            sequence.token_at = sequence.first_at
            self._resumed.append(sequence)

    def _computed(self, sequence: Sequence) -> None:
        self._computing.remove(sequence)
        if not sequence.left:
            del self.running[sequence]
            self._on_computed(sequence)
            return
        if sequence.token_at is not None:
            self._gaps.add(self._events.now - sequence.token_at)
            sequence.token_at = None
        sequence.left -= 1
        if sequence.first_at is None:
            sequence.first_at = self._events.now
            self._on_computed(sequence)
        if sequence.left:
            self._join(sequence, sequence.context)
        else:
            # Before a preemption the sequence may have had this step as its end.
            sequence.ends = -1
            self._leave(sequence)

    def _join(self, sequence: Sequence, kv_tokens: int) -> None:
        self._streams += 1
        self._kv_tokens += kv_tokens
        sequence.computed = kv_tokens
        sequence.joined, sequence.ends = self._step, self._step + sequence.left
        self._number += 1
        heapq.heappush(self._ends, (sequence.ends, self._number, sequence))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._free(sequence)
        self._on_end(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.used -= sequence.memory
        sequence.memory = 0

    def _unjoin(self, sequence: Sequence) -> None:
        """A sequence does not decode any more. Then `memory` is all that it occupies."""
        grown = self._step - sequence.joined
        self._streams -= 1
        self._kv_tokens -= sequence.computed + grown
        sequence.memory += grown
        sequence.left = sequence.ends - self._step
        sequence.ends = -1

    def _make_room(self) -> None:
        """Preempts the newest sequences until all others can grow by a token."""
        while self._streams and self._timing.kv_tokens - self.used < self._streams:
            sequence = next(reversed(self.running))
            del self.running[sequence]
            self.preemptions += 1
            if sequence.ends >= 0:
                self._unjoin(sequence)
                if sequence.token_at is None and sequence.first_at is not None:
                    sequence.token_at = self._events.now
            else:
                self._computing.remove(sequence)
            request = sequence.request
            sequence.context = request.prompt_tokens + request.output_tokens - sequence.left
            sequence.computed, sequence.remote = 0, False
            self._free(sequence)
            self.waiting.appendleft(sequence)
