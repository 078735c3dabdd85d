"""`dynamo-lite explain`: why prompts were prefilled locally or remotely."""

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
        str,
        typer.Argument(metavar="[REQUEST_ID]", help="Id of the response: chatcmpl-..., cmpl-..."),
    ] = "",
    last: Annotated[
        int | None, typer.Option(min=1, max=4096, help="List the last N decisions.")
    ] = None,
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why a prompt was prefilled locally or by a prefill worker, and the outcome.

    REQUEST_ID is the `id` of the response. For a request with several prompts or `n` > 1, and
    for one that migrated to another worker, all its decisions are shown. Decode workers keep
    decisions for 15 minutes, at most 4096 each. Exit code 1: no decode worker has this one.

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
    answers = asyncio.run(ask_engines(place, broker, wanted))
    for engine in answers.silent:
        print(f"warning: decode engine {engine} does not respond", file=sys.stderr)
    taken = answers.taken[-(last or len(answers.taken)) :]
    if as_json:
        print(json.dumps(decision_view.as_json(taken), indent=2))
    elif last is not None:
        print(decision_view.as_table(taken))
    elif taken:
        print("\n\n".join(decision_view.as_text(each) for each in taken))
    if request_id and not taken:
        message = (
            f"error: {request_id}: none of {answers.engines} decode engines has a decision of it"
        )
        kept = f"decisions are kept for {LONGEST_S / 60:g} minutes, at most {MOST} per engine"
        print(f"{message}; {kept}", file=sys.stderr)
        raise typer.Exit(_EXIT_UNKNOWN)
