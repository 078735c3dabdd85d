"""`dynamo-lite explain`: asks all decode engines and Forwarders about past decisions, and prints
the records that they answer with."""

import asyncio
import json
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import typer

from dynamo_lite.cli.arguments import Json, NatsUrl
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
    StartupError,
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
    decode: Callable[[bytes], Explained | ForwardExplained]


DECODE = Kind(
    "decode engine",
    "worker",
    ("prompt_tokens", "cached_tokens", "queue.jobs", "verdict", "reason", "asked.outcome"),
    decode_explained,
)
FORWARDER = Kind(
    "Forwarder",
    "forwarder",
    ("prompt_tokens", "how", "reason", "status", "outcome", "took_s"),
    decode_forward_explained,
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


@on_graph
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
    nats_url: NatsUrl = None,
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
    wanted = Explain(request_id=request_id, last=last or 4096)
    answers = asyncio.run(_ask_all(replace(graph, nats_url=nats_url), wanted))
    for kind, name, told in answers:
        if told is None:
            print(f"warning: {kind.noun} {name} does not respond", file=sys.stderr)
    found: dict[Kind, list[Taken]] = {}
    for kind in (DECODE, FORWARDER):
        taken = [one for each, _, told in answers if each is kind for one in told or ()]
        found[kind] = sorted(taken, key=lambda one: one.at)[-wanted.last :]
    every = [one for taken in found.values() for one in taken]
    if as_json:
        print(json.dumps([one.as_json() for one in every], indent=2))
    elif last is not None:
        shown = [as_table(kind, taken) for kind, taken in found.items() if taken]
        print("\n\n".join(shown or [as_table(DECODE, [])]))
    elif every:
        print("\n\n".join(one.as_text() for one in every))
    if request_id and not every:
        replied = Counter(kind for kind, _, told in answers if told is not None)
        asked = [f"{replied[k]} {k.noun}s" for k in found if replied[k] or k is DECODE]
        raise StartupError(
            f"{request_id}: none of {' and '.join(asked)} has a decision of it; decisions are kept"
            f" for {LONGEST_S / 60:g} minutes, at most {MOST} per engine"
        )


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


#: Who was asked: the id of an engine, or the lease of a Forwarder, hexadecimal. None: no reply.
_Answer = tuple[Kind, str, Sequence[Taken] | None]


async def _ask_all(graph: OnGraph, wanted: Explain) -> Sequence[_Answer]:
    """All decode engines, and all Forwarders. Raises StartupError, Unavailable."""
    place = graph.place()
    namespace = place.namespace
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(namespace)
        keys = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
        running = await members(store, namespace)
    asked = [
        (DECODE, engine, names.explain_subject(namespace, engine))
        for engine in sorted(filter(names.is_engine_id, keys))
    ]
    asked += [
        (FORWARDER, f"{lease:x}", names.forward_explain_subject(namespace, lease))
        for lease in sorted({one.lease_id for one in running if one.component == "Forwarder"})
    ]
    async with open_broker(place) as messaging:
        return await asyncio.gather(*(_ask(messaging, wanted, *one) for one in asked))


async def _ask(
    messaging: Messaging, wanted: Explain, kind: Kind, name: str, subject: str
) -> _Answer:
    try:
        reply = await messaging.request(subject, encode(wanted), timeout_s=_ANSWER_S)
        told = kind.decode(reply)
    except (NoResponders, DeadlineExceeded, ProtocolError):
        return kind, name, None
    now = time.time()
    return kind, name, [Taken(kind, now - d.age_s, told.lease_id, d) for d in told.decisions]
