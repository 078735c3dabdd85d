"""`dynamo-lite explain`: asks all decode engines and Forwarders about past decisions, and prints
the records that they answer with."""

import asyncio
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

from dynamo_lite.cli.arguments import EXIT_FAILED, Json
from dynamo_lite.cli.listing import OnGraph, members, on_graph, open_broker, open_store, table
from dynamo_lite.disagg.decode.decision_log import LONGEST_S, MOST
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Decision, Explain, Explained, decode_explained
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
)
from dynamo_lite.protocol.forwarding import (
    ForwardDecision,
    ForwardExplained,
    decode_forward_explained,
)
from dynamo_lite.runtime.messaging import Messaging

#: Timeout for the reply of one engine or Forwarder.
_ANSWER_S = 3.0


@dataclass(frozen=True)
class Kind:
    """Who decides."""

    noun: str
    #: What has the lease.
    owner: str
    #: Of the table; a dot leads into a record.
    columns: tuple[str, ...]


DECODE = Kind(
    "decode engine",
    "worker",
    ("prompt_tokens", "cached_tokens", "queue.jobs", "verdict", "reason", "asked.outcome"),
)
FORWARDER = Kind(
    "Forwarder", "forwarder", ("prompt_tokens", "how", "reason", "status", "outcome", "took_s")
)


@dataclass(frozen=True)
class Taken:
    """A decision: when (seconds since the epoch by this host's clock), by whom, and what."""

    kind: Kind
    at: float
    lease_id: int
    decision: Decision | ForwardDecision

    def as_json(self) -> dict[str, Any]:
        owner = {self.kind.owner: f"{self.lease_id:x}"}
        return {"at": self.at, **owner, **msgspec.to_builtins(self.decision)}

    def as_text(self) -> str:
        """All that is known, by the names of the record's fields."""
        import yaml

        known = _known(self.decision)
        for shown in ("request_id", "age_s"):
            known.pop(shown, None)
        lines = yaml.safe_dump(known, sort_keys=False, default_flow_style=None, width=90)
        head = f"{self._name}  {_clock(self.at)}  {self.kind.owner} {self.lease_id:x}"
        return f"{head}\n{textwrap.indent(lines, '  ')}".rstrip()

    def cells(self) -> list[str]:
        cells = [_clock(self.at), self._name]
        for column in self.kind.columns:
            value: Any = _known(self.decision)
            for step in column.split("."):
                value = value.get(step, {})
            cells.append("-" if value == {} else str(value))
        return cells

    @property
    def _name(self) -> str:
        ids = self.decision.ids if isinstance(self.decision, ForwardDecision) else []
        return self.decision.request_id or next(iter(ids), "?")


def as_table(kind: Kind, taken: Sequence[Taken]) -> str:
    columns = [column.rpartition(".")[2] for column in kind.columns]
    return table(("at", "request", *columns), [one.cells() for one in taken])


@dataclass(frozen=True)
class _Answers:
    """The replies of all decode engines, or of all Forwarders."""

    kind: Kind
    #: Oldest first.
    taken: Sequence[Taken]
    #: Number of those that replied.
    replied: int
    #: Those that did not: ids of engines, or leases of Forwarders, hexadecimal.
    silent: list[str]


@on_graph()
def explain(
    graph: OnGraph,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="Id of the response (chatcmpl-..., cmpl-...), or the request's X-Request-Id.",
        ),
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, max=4096, help="List the last N decisions.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain why a prompt was prefilled locally or by a prefill worker, and the outcome.

    For a request with several prompts or `n` > 1, and for one that migrated to another worker,
    all its decisions are shown. Decode workers keep decisions for 15 minutes, at most 4096 each.
    What is empty is left out: a remote prefill without an outcome is under way, a decision without
    a queue was made before the queue was read. Exit code 1: no decode worker has this one.

    Forwarders are asked, too: which engines a request got and why, its legs, and what failed.
    At most 256 of a Forwarder are shown.

    \b
    dynamo-lite explain chatcmpl-95c64d7edf3447eb
    dynamo-lite explain --last 20
    """
    if bool(request_id) == (last is not None):
        raise ConfigError(["give either REQUEST_ID or --last N"])
    if len(request_id) > 256:
        raise ConfigError(["REQUEST_ID: at most 256 characters"])
    answers = asyncio.run(_ask_all(graph, Explain(request_id=request_id, last=last or 4096)))
    for each in answers:
        for name in each.silent:
            print(f"warning: {each.kind.noun} {name} does not respond", file=sys.stderr)
    found = [each for each in answers if each.taken]
    taken = [one for each in found for one in each.taken]
    if as_json:
        print(json.dumps([one.as_json() for one in taken], indent=2))
    elif request_id:
        print("\n\n".join(one.as_text() for one in taken), end="\n" if taken else "")
    else:
        print("\n\n".join(as_table(each.kind, each.taken) for each in found or answers[:1]))
    if not request_id or found:
        return
    asked = " and ".join(
        f"{each.replied} {each.kind.noun}s"
        for each in answers
        if each.replied or each is answers[0]
    )
    print(
        f"error: {request_id}: none of {asked} has a decision of it; decisions are kept for"
        f" {LONGEST_S / 60:g} minutes, at most {MOST} per engine",
        file=sys.stderr,
    )
    raise typer.Exit(EXIT_FAILED)


def _known(value: Any) -> Any:
    """A record as plain values, without what is empty, and its numbers in three digits."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        found = {name: _known(each) for name, each in value.items()}
        return {name: each for name, each in found.items() if each not in (None, "", [], {})}
    if isinstance(value, list):
        return [_known(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else None
    return value


def _clock(at: float) -> str:
    """Time of day, with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03}"


async def _ask_all(graph: OnGraph, wanted: Explain) -> Sequence[_Answers]:
    """Of decode engines, and of Forwarders. Raises StartupError, Unavailable."""
    place = graph.place()
    namespace = place.namespace
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(namespace)
        keys = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
        running = await members(store, namespace)
    leases = sorted({record.lease_id for record in running if record.component == "Forwarder"})
    engines = {
        engine: names.explain_subject(namespace, engine)
        for engine in sorted(filter(names.is_engine_id, keys))
    }
    forwarders = {f"{one:x}": names.forward_explain_subject(namespace, one) for one in leases}
    async with open_broker(place) as messaging:
        ask = partial(_ask, messaging, wanted)
        return await asyncio.gather(
            ask(DECODE, engines, decode_explained),
            ask(FORWARDER, forwarders, decode_forward_explained),
        )


async def _ask(
    messaging: Messaging,
    wanted: Explain,
    kind: Kind,
    subjects: Mapping[str, str],
    decode: Callable[[bytes], Explained | ForwardExplained],
) -> _Answers:
    """subjects: by the name of who is asked."""

    async def ask(subject: str) -> Sequence[Taken] | None:
        try:
            reply = await messaging.request(subject, encode(wanted), timeout_s=_ANSWER_S)
            told = decode(reply)
        except (NoResponders, DeadlineExceeded, ProtocolError):
            return None
        now = time.time()
        return [Taken(kind, now - each.age_s, told.lease_id, each) for each in told.decisions]

    answers = await asyncio.gather(*map(ask, subjects.values()))
    taken = sorted((one for answer in answers for one in answer or ()), key=lambda one: one.at)
    silent = [name for name, answer in zip(subjects, answers, strict=True) if answer is None]
    return _Answers(kind, taken[-wanted.last :], len(subjects) - len(silent), silent)
