"""Asks all decode engines and Forwarders about past decisions, and prints what they say."""

import asyncio
import json
import sys

from dynamo_lite.cli import decision_view, forward_view
from dynamo_lite.cli.decisions import Answers, ask_engines, ask_forwarders
from dynamo_lite.cli.exits import EXIT_FAILED
from dynamo_lite.cli.listing import Broker, Place
from dynamo_lite.disagg.decode.decision_log import LONGEST_S, MOST
from dynamo_lite.protocol.decisions import Decision, Explain
from dynamo_lite.protocol.forwarding import ForwardDecision


def run(place: Place, broker: Broker, wanted: Explain, *, as_json: bool) -> int:
    """Returns the exit code. wanted: of one request, or the last ones of all."""
    engines, forwarders = asyncio.run(_ask(place, broker, wanted))
    for engine in engines.silent:
        print(f"warning: decode engine {engine} does not respond", file=sys.stderr)
    for lease in forwarders.silent:
        print(f"warning: Forwarder {lease} does not respond", file=sys.stderr)
    if broker.secret_file is None and (engines.silent or forwarders.silent):
        print("warning: if the graph has a secret, name it: --secret-file FILE", file=sys.stderr)
    taken, forwarded = engines.taken[-wanted.last :], forwarders.taken[-wanted.last :]
    if as_json:
        rows = [*decision_view.as_json(taken), *forward_view.as_json(forwarded)]
        print(json.dumps(rows, indent=2))
    elif wanted.request_id:
        texts = [decision_view.as_text(each) for each in taken]
        texts += [forward_view.as_text(each) for each in forwarded]
        if texts:
            print("\n\n".join(texts))
    else:
        tables = [decision_view.as_table(taken)] if taken or not forwarded else []
        tables += [forward_view.as_table(forwarded)] if forwarded else []
        print("\n\n".join(tables))
    if not wanted.request_id or taken or forwarded:
        return 0
    print(_unknown(wanted, engines, forwarders), file=sys.stderr)
    return EXIT_FAILED


async def _ask(
    place: Place, broker: Broker, wanted: Explain
) -> tuple[Answers[Decision], Answers[ForwardDecision]]:
    return await asyncio.gather(
        ask_engines(place, broker, wanted), ask_forwarders(place, broker, wanted)
    )


def _unknown(
    wanted: Explain, engines: Answers[Decision], forwarders: Answers[ForwardDecision]
) -> str:
    asked = f"{engines.replied} decode engines"
    if forwarders.replied:
        asked += f" and {forwarders.replied} Forwarders"
    return (
        f"error: {wanted.request_id}: none of {asked} has a decision of it; decisions are kept for"
        f" {LONGEST_S / 60:g} minutes, at most {MOST} per engine"
    )
