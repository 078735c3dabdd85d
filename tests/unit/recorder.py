"""A Tracer that keeps all spans."""

from dataclasses import dataclass
from typing import Any

from dynamo_lite.protocol.trace import TraceContext


@dataclass(frozen=True)
class Told:
    name: str
    context: TraceContext
    parent: str
    start: float
    end: float
    kind: str
    attributes: dict[str, Any]
    error: str


class Recorder:
    def __init__(self) -> None:
        self.spans: list[Told] = []

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        return None if incoming is None else incoming.child()

    def record(
        self,
        name: str,
        context: TraceContext,
        parent: str,
        start: float,
        end: float,
        *,
        kind: str = "internal",
        attributes: Any = None,
        error: str = "",
    ) -> None:
        told = Told(name, context, parent, start, end, kind, dict(attributes or {}), error)
        self.spans.append(told)

    def named(self, name: str) -> Told:
        [found] = [span for span in self.spans if span.name == name]
        return found
