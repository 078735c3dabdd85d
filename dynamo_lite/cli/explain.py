"""`dynamo-lite explain`: asks all decode engines and Forwarders about past decisions."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import typer

from dynamo_lite.cli import decision_view, forward_view
from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EXIT_FAILED,
    CertificatesDir,
    EtcdUrl,
    Json,
    Namespace,
    NatsUrl,
    StateDir,
)
from dynamo_lite.cli.listing import (
    Place,
    find_nats,
    find_place,
    members,
    open_broker,
    open_store,
)
from dynamo_lite.disagg.decode.decision_log import LONGEST_S, MOST
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Decision, Explain, decode_explained
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
)
from dynamo_lite.protocol.forwarding import ForwardDecision, decode_forward_explained
from dynamo_lite.runtime.messaging import Messaging

#: Timeout for the reply of one engine or Forwarder.
_ANSWER_S = 3.0

D = TypeVar("D", Decision, ForwardDecision)


@dataclass(frozen=True)
class _Answers(Generic[D]):
    """The replies of all decode engines, or of all Forwarders."""

    #: When (seconds since the epoch by this host's clock), by whom (lease), and what; oldest first.
    taken: list[tuple[float, int, D]]
    #: Number of those that replied.
    replied: int
    #: Those that did not: ids of engines, or leases of Forwarders, hexadecimal.
    silent: list[str]


def explain(
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
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    certificates: CertificatesDir = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
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
    place = find_place(state_dir, etcd_url, namespace, certificates)
    nats = find_nats(state_dir, nats_url, certificates)
    wanted = Explain(request_id=request_id, last=last or 4096)
    raise typer.Exit(_run(place, nats, wanted, as_json))


def _run(place: Place, nats: str, wanted: Explain, as_json: bool) -> int:
    """Returns the exit code. wanted: of one request, or the last ones of all."""
    engines, forwarders = asyncio.run(_ask_both(place, nats, wanted))
    for engine in engines.silent:
        print(f"warning: decode engine {engine} does not respond", file=sys.stderr)
    for lease in forwarders.silent:
        print(f"warning: Forwarder {lease} does not respond", file=sys.stderr)
    taken, forwarded = engines.taken[-wanted.last :], forwarders.taken[-wanted.last :]
    if as_json:
        rows = [*decision_view.as_json(taken), *forward_view.as_json(forwarded)]
        print(json.dumps(rows, indent=2))
    elif wanted.request_id:
        texts = [decision_view.as_text(*each) for each in taken]
        texts += [forward_view.as_text(*each) for each in forwarded]
        if texts:
            print("\n\n".join(texts))
    else:
        tables = [decision_view.as_table(taken)] if taken or not forwarded else []
        tables += [forward_view.as_table(forwarded)] if forwarded else []
        print("\n\n".join(tables))
    if not wanted.request_id or taken or forwarded:
        return 0
    asked = f"{engines.replied} decode engines"
    if forwarders.replied:
        asked += f" and {forwarders.replied} Forwarders"
    print(
        f"error: {wanted.request_id}: none of {asked} has a decision of it; decisions are kept for"
        f" {LONGEST_S / 60:g} minutes, at most {MOST} per engine",
        file=sys.stderr,
    )
    return EXIT_FAILED


async def _ask_both(
    place: Place, nats: str, wanted: Explain
) -> tuple[_Answers[Decision], _Answers[ForwardDecision]]:
    """Raises StartupError, Unavailable."""
    async with open_store(place) as store:
        prefix = names.nixl_metadata_prefix(place.namespace)
        keys = [key.removeprefix(prefix) for key in await store.get_prefix(prefix)]
    engines = {
        engine: names.explain_subject(place.namespace, engine)
        for engine in sorted(filter(names.is_engine_id, keys))
    }
    found = [record for record in await members(place) if record.component == "Forwarder"]
    forwarders = {
        f"{lease:x}": names.forward_explain_subject(place.namespace, lease)
        for lease in sorted({record.lease_id for record in found})
    }
    async with open_broker(nats) as messaging:
        return await asyncio.gather(
            _ask_all(messaging, engines, wanted, _of_engine),
            _ask_all(messaging, forwarders, wanted, _of_forwarder),
        )


def _of_engine(payload: bytes) -> tuple[int, list[Decision]]:
    told = decode_explained(payload)
    return told.lease_id, told.decisions


def _of_forwarder(payload: bytes) -> tuple[int, list[ForwardDecision]]:
    told = decode_forward_explained(payload)
    return told.lease_id, told.decisions


async def _ask_all(
    messaging: Messaging,
    subjects: Mapping[str, str],
    wanted: Explain,
    decode: Callable[[bytes], tuple[int, list[D]]],
) -> _Answers[D]:
    """subjects: by the name of who is asked."""

    async def ask(subject: str) -> list[tuple[float, int, D]] | None:
        try:
            reply = await messaging.request(subject, encode(wanted), timeout_s=_ANSWER_S)
            lease_id, decisions = decode(reply)
        except (NoResponders, DeadlineExceeded, ProtocolError):
            return None
        now = time.time()
        return [(now - each.age_s, lease_id, each) for each in decisions]

    answers = await asyncio.gather(*map(ask, subjects.values()))
    taken = sorted((each for answer in answers for each in answer or ()), key=lambda each: each[0])
    silent = [name for name, answer in zip(subjects, answers, strict=True) if answer is None]
    return _Answers(taken, len(subjects) - len(silent), silent)
