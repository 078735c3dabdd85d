"""`dynamo-lite explain`: asks all decode engines and Forwarders about past decisions."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated, Any

import msgspec
import typer

from dynamo_lite.cli import decision_view, forward_view
from dynamo_lite.cli.arguments import EXIT_FAILED, Json
from dynamo_lite.cli.listing import OnGraph, members_in, on_graph, open_broker, open_store, table
from dynamo_lite.disagg.decode.decision_log import LONGEST_S, MOST
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain, Explained, decode_explained
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
)
from dynamo_lite.protocol.forwarding import ForwardExplained, decode_forward_explained
from dynamo_lite.runtime.messaging import Messaging

#: Timeout for the reply of one engine or Forwarder.
_ANSWER_S = 3.0

#: Decisions: when (seconds since the epoch by this host's clock), by whom (lease), and what.
_Taken = Sequence[tuple[float, int, Any]]


@dataclass(frozen=True)
class _Answers:
    """The replies of all decode engines, or of all Forwarders."""

    kind: str
    #: The module that prints their decisions.
    view: ModuleType
    #: Oldest first.
    taken: _Taken
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
    Exit code 1: no decode worker has this one.

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
    raise typer.Exit(_run(graph, wanted, as_json))


def _run(graph: OnGraph, wanted: Explain, as_json: bool) -> int:
    """Returns the exit code. wanted: of one request, or the last ones of all."""
    answers = asyncio.run(_ask_all(graph, wanted))
    for each in answers:
        for name in each.silent:
            print(f"warning: {each.kind} {name} does not respond", file=sys.stderr)
    found = [each for each in answers if each.taken]
    if as_json:
        rows = [row for each in found for row in json_rows(each.view, each.taken)]
        print(json.dumps(rows, indent=2))
    elif wanted.request_id:
        texts = [each.view.as_text(*one) for each in found for one in each.taken]
        print("\n\n".join(texts), end="\n" if texts else "")
    else:
        print("\n\n".join(as_table(each.view, each.taken) for each in found or answers[:1]))
    if not wanted.request_id or found:
        return 0
    asked = " and ".join(
        f"{each.replied} {each.kind}s" for each in answers if each.replied or each is answers[0]
    )
    print(
        f"error: {wanted.request_id}: none of {asked} has a decision of it; decisions are kept for"
        f" {LONGEST_S / 60:g} minutes, at most {MOST} per engine",
        file=sys.stderr,
    )
    return EXIT_FAILED


def json_rows(view: ModuleType, taken: _Taken) -> list[dict[str, Any]]:
    """view: the module that prints such decisions."""
    return [
        {"at": at, view.KEY: f"{lease_id:x}", **msgspec.to_builtins(one)}
        for at, lease_id, one in taken
    ]


def as_table(view: ModuleType, taken: _Taken) -> str:
    return table(view.COLUMNS, [view.cells(at, one) for at, _, one in taken])


async def _ask_all(graph: OnGraph, wanted: Explain) -> Sequence[_Answers]:
    """Of decode engines, and of Forwarders. Raises StartupError, Unavailable."""
    place = graph.place()
    namespace = place.namespace
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(namespace)
        keys = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
        running = await members_in(store, namespace)
    leases = sorted({record.lease_id for record in running if record.component == "Forwarder"})
    engines = {
        engine: names.explain_subject(namespace, engine)
        for engine in sorted(filter(names.is_engine_id, keys))
    }
    forwarders = {f"{one:x}": names.forward_explain_subject(namespace, one) for one in leases}
    async with open_broker(place) as messaging:
        ask = partial(_ask, messaging, wanted)
        return await asyncio.gather(
            ask("decode engine", decision_view, engines, decode_explained),
            ask("Forwarder", forward_view, forwarders, decode_forward_explained),
        )


async def _ask(
    messaging: Messaging,
    wanted: Explain,
    kind: str,
    view: ModuleType,
    subjects: Mapping[str, str],
    decode: Callable[[bytes], Explained | ForwardExplained],
) -> _Answers:
    """subjects: by the name of who is asked."""

    async def ask(subject: str) -> _Taken | None:
        try:
            reply = await messaging.request(subject, encode(wanted), timeout_s=_ANSWER_S)
            told = decode(reply)
        except (NoResponders, DeadlineExceeded, ProtocolError):
            return None
        now = time.time()
        return [(now - each.age_s, told.lease_id, each) for each in told.decisions]

    answers = await asyncio.gather(*map(ask, subjects.values()))
    taken = sorted((each for answer in answers for each in answer or ()), key=lambda each: each[0])
    silent = [name for name, answer in zip(subjects, answers, strict=True) if answer is None]
    return _Answers(kind, view, taken[-wanted.last :], len(subjects) - len(silent), silent)
