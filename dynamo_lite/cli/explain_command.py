"""`dynamo-lite explain`: why prompts were prefilled where they were."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, EtcdUrl, Namespace, NatsUrl, StateDir
from dynamo_lite.protocol.errors import ConfigError

_EXIT_UNKNOWN = 1


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="[REQUEST_ID]", help="As in the answer: chatcmpl-..., cmpl-...")
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, max=4096, help="List so many of the last decisions.")
    ] = None,
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a prompt was prefilled here or by a prefill worker, and what came of it.

    REQUEST_ID is the `id` of the answer that the client got. Of a request with several
    prompts or `n` > 1, and of one that moved to another worker, all decisions are shown.
    Decode workers remember them for 15 minutes, 4096 each at most; exit code 1: nobody
    remembers this one.

    \b
    dynamo-lite explain chatcmpl-95c64d7edf3447eb
    dynamo-lite explain --last 20
    """
    from dynamo_lite.cli import decision_view
    from dynamo_lite.cli.decisions import ask_engines, find_broker
    from dynamo_lite.cli.listing import find_place
    from dynamo_lite.disagg.decode.decision_log import LONGEST_S, MOST
    from dynamo_lite.protocol.decisions import Explain

    if bool(request_id) == (last is not None):
        raise ConfigError(["give either REQUEST_ID or --last N"])
    if len(request_id) > 256:
        raise ConfigError(["REQUEST_ID: at most 256 characters"])
    place, broker = find_place(state_dir, etcd_url, namespace), find_broker(state_dir, nats_url)
    wanted = Explain(request_id=request_id, last=last or 4096)
    told = asyncio.run(ask_engines(place, broker, wanted))
    for engine in told.silent:
        print(f"warning: decode engine {engine} does not answer", file=sys.stderr)
    taken = told.taken[-(last or len(told.taken)) :]
    if as_json:
        print(json.dumps(decision_view.as_json(taken), indent=2))
    elif last is not None:
        print(decision_view.as_table(taken))
    elif taken:
        print("\n\n".join(decision_view.as_text(each) for each in taken))
    if request_id and not taken:
        said = f"error: {request_id}: none of {told.engines} decode engines remembers it"
        kept = f"they do for {LONGEST_S / 60:g} minutes, and {MOST} decisions each"
        print(f"{said}; {kept}", file=sys.stderr)
        raise typer.Exit(_EXIT_UNKNOWN)
