"""`dynamo-lite top`: shows a running graph live."""

import asyncio
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, EtcdUrl, Namespace, NatsUrl, StateDir


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one plain frame and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two frames.")
    ] = 1.0,
    etcd_url: EtcdUrl = None,
    nats_url: NatsUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON.")] = False,
) -> None:
    """Watch a running graph: workers, queue, decisions, latencies, transfers, links.

    RUNNING and WAITING count requests, for a prefill worker jobs. Rates cover the last 10
    seconds and latencies, which the Frontend measures, the last 60; with --once and --json
    both cover one --interval. TOTAL counts since the live workers started. Ctrl-C exits. The
    Frontend serves the same view at /dashboard.

    \b
    dynamo-lite top
    dynamo-lite top --once --interval 10
    """
    from dynamo_lite.cli import top
    from dynamo_lite.cli.decisions import find_broker
    from dynamo_lite.cli.listing import find_place

    place, broker = find_place(state_dir, etcd_url, namespace), find_broker(state_dir, nats_url)
    observing = top.observing(place, broker)
    if as_json:
        shown = top.print_json(observing, interval)
    elif once:
        shown = top.print_frame(observing, interval)
    else:
        shown = top.watch(observing, interval)
    asyncio.run(top.until_signal(shown))
