"""`dynamo-lite explain` and `dynamo-lite top`: what a running graph decides and does."""

import asyncio
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EtcdUrl,
    Json,
    Namespace,
    NatsUrl,
    SecretFile,
    StateDir,
)
from dynamo_lite.protocol.errors import ConfigError


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
    secret_file: SecretFile = None,
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
    from dynamo_lite.cli.explain import run
    from dynamo_lite.cli.listing import find_broker, find_place
    from dynamo_lite.protocol.decisions import Explain

    if bool(request_id) == (last is not None):
        raise ConfigError(["give either REQUEST_ID or --last N"])
    if len(request_id) > 256:
        raise ConfigError(["REQUEST_ID: at most 256 characters"])
    place = find_place(state_dir, etcd_url, namespace)
    broker = find_broker(state_dir, nats_url, secret_file)
    wanted = Explain(request_id=request_id, last=last or 4096)
    raise typer.Exit(run(place, broker, wanted, as_json=as_json))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one plain frame and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two frames.")
    ] = 1.0,
    etcd_url: EtcdUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON.")] = False,
) -> None:
    """Watch a running graph: workers, queue, decisions, latencies, transfers, links.

    RUNNING and WAITING count requests, for a prefill worker jobs. Rates cover the last 10
    seconds and latencies, which the Frontend measures, the last 60; with --once and --json
    both cover one --interval. TOTAL counts since the live workers started. Ctrl-C exits. The
    Frontend serves the same view at /dashboard. Of a Forwarder it shows requests, the engines
    that all Forwarders use per role, and answers per second: disaggregated, alone (and why) and
    passed on.

    \b
    dynamo-lite top
    dynamo-lite top --once --interval 10
    """
    from dynamo_lite.cli.listing import find_place
    from dynamo_lite.cli.top import show

    place = find_place(state_dir, etcd_url, namespace)
    asyncio.run(show(place, interval, once=once or as_json, as_json=as_json))
