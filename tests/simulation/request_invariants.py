"""The invariants of requests.

Each ends once, in time, with the model's tokens or a stated error. None waits for the broker, or
fails because of it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.protocol.errors import DynamoLiteError, Unavailable
from tests.simulation.client import Story
from tests.simulation.engine.model import first_wrong
from tests.simulation.engine.request import SimRequest
from tests.simulation.tally import Wait, Waits

#: How much later than its deadline a request may end: the next turn of its process.
_LATE_S = 0.1
#: How long a request may take to a worker in a run with no faults but the broker's.
_PLACING_S = 0.1


@dataclass
class RequestJudge:
    """Keeps the story of each request, and checks all of them at the end of the run."""

    #: Virtual time.
    now: Callable[[], float]
    violate: Callable[[str], None]
    counts: Counter[str]
    #: Whether the scenario has no faults but faults of the broker.
    only_broker_fails: bool
    waits: Waits = field(default_factory=Waits)
    #: Client and story of each request, in the order of their start.
    _stories: list[tuple[str, Story]] = field(default_factory=list[tuple[str, Story]])

    def begun(self, client: str, story: Story) -> None:
        self._stories.append((client, story))

    def client_died(self, client: str) -> None:
        """The connections of its callers break, which ends their requests."""
        for name, story in self._stories:
            if name == client and not story.ends:
                story.end("client died", self.now())

    def under_way(self) -> list[Story]:
        return [story for _, story in self._stories if not story.ends]

    def judge(self, held_up_s: Callable[[str, float, float], float]) -> None:
        """held_up_s: for how long a client was unable to act between two times."""
        for client, story in self._stories:
            self.counts[f"request {_kind(story)}"] += 1
            for text in _wrongs(story):
                self.violate(f"request {story.ask.request_id} of {client}: {text}")
            if self.only_broker_fails and story.workers_up:
                for text in _held_up(story):
                    self.violate(f"request {story.ask.request_id} of {client}: {text}")
            if story.ended_at is None or story.ends[0] == "client died":
                continue
            held_up = held_up_s(client, story.began_at, story.ended_at)
            wait = Wait(
                request=f"{story.ask.request_id} of {client}",
                waited_s=story.ended_at - story.began_at,
                limit_s=story.ask.timeout_s + held_up,
                how=story.ends[0],
            )
            self.waits.add(wait)
            if wait.over_s > _LATE_S:
                self.violate(
                    f"request {wait.request} ended {wait.over_s:.3f} s after its deadline:"
                    f" {wait.how}"
                )

    def cancelled_at(self, request: SimRequest) -> float | None:
        """When the caller of an engine's request left; None if it has not cancelled it."""
        name = request.request_id.partition("~")[0]
        for _, story in reversed(self._stories):
            if story.ask.request_id == name and story.began_at <= request.arrived:
                return story.ended_at if story.ends[:1] == ["cancelled"] else None
        return None


def _kind(story: Story) -> str:
    if story.error is not None:
        return type(story.error).__name__
    return story.ends[0] if story.ends else "without an end"


def _held_up(story: Story) -> list[str]:
    """What went wrong with a request whose workers were up all the time."""
    out: list[str] = []
    placed_at = story.ended_at if story.placed_at is None else story.placed_at
    if placed_at is not None and placed_at - story.began_at > _PLACING_S:
        out.append(f"it waited {placed_at - story.began_at:.3f} s for a worker, and all were up")
    if isinstance(story.error, Unavailable):
        out.append(f"it ended with {story.ends[0]!r}, and all workers were up")
    return out


def _wrongs(story: Story) -> list[str]:
    out: list[str] = []
    ask = story.ask
    if len(story.ends) != 1:
        out.append(f"it ended {len(story.ends)} times: {story.ends}")
    wrong = first_wrong(ask.prompt, ask.sampling, story.tokens)
    if wrong is not None:
        out.append(f"token {wrong} of {len(story.tokens)} is wrong")
    if len(story.tokens) > ask.sampling.max_tokens:
        out.append(f"{len(story.tokens)} tokens instead of {ask.sampling.max_tokens}")
    if story.ends[:1] == ["length"]:
        if len(story.tokens) != ask.sampling.max_tokens:
            out.append(f"{len(story.tokens)} tokens instead of {ask.sampling.max_tokens}")
        if story.prompts_told != 1:
            out.append(f"its prompt was accounted for {story.prompts_told} times")
    elif story.ends and not isinstance(story.error, DynamoLiteError):
        if story.ends[0] not in ("cancelled", "client died", "refused: the same id is running"):
            out.append(f"it ended with {story.ends[0]!r}")
    return out
