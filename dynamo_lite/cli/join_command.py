"""`dynamo-lite join`: registers a stock engine for Forwarders."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EtcdUrl,
    LogLines,
    Namespace,
    StateDir,
    Verbose,
)
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.forwarding import JOINED_AS, ProtocolName
from dynamo_lite.protocol.records import LAST_PORT

JoinRole = Literal["prefill", "decode", "prefill-decode", "both"]


def join(
    url: Annotated[
        str,
        typer.Option(
            help="The engine's OpenAI server, http(s)://HOST:PORT, for Forwarders.",
        ),
    ],
    role: Annotated[JoinRole, typer.Option(help="both: prefill-decode.")],
    protocol: Annotated[ProtocolName, typer.Option(help="Its handover protocol.")],
    transfer_host: Annotated[
        str | None, typer.Option(help="Host where the engine hands KV over; default: the URL's.")
    ] = None,
    transfer_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LAST_PORT,
            help="Port there (bootstrap server, KVT, MoRIIO); default: the protocol's.",
        ),
    ] = None,
    notify_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=LAST_PORT, help="Port for MoRIIO's notices; default: the protocol's."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Name of its model, if its /v1/models needs a key.")
    ] = "",
    ca_file: Annotated[
        str | None,
        typer.Option(help="PEM file of its certificate's authorities; default: the system's."),
    ] = None,
    namespace: Namespace = None,
    etcd_url: EtcdUrl = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="The graph's certificates: a folder with ca.pem and, by --role, the pair of"
            " Engine, PrefillEngine or DecodeEngine. Needed if --bind-host is no loopback address."
        ),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    grace_s: Annotated[
        float,
        typer.Option(min=0, help="Longest wait at the end for the engine's requests, in seconds."),
    ] = 60.0,
    lease_ttl_s: Annotated[
        float,
        typer.Option(
            min=2, help="If this process is killed, the engine leaves after this many seconds."
        ),
    ] = 10.0,
    health_interval_s: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two checks of the engine.")
    ] = 1.0,
    bind_host: Annotated[
        str, typer.Option(help="Address of the status server (/health, /metrics).")
    ] = "127.0.0.1",
    verbose: Verbose = False,
    log_format: LogLines = "text",
) -> None:
    """Register a stock engine for Forwarders, and keep it registered while it is healthy.

    Start it beside the engine: `vllm serve`, SGLang, ... When the engine's /health passes, it
    puts a record of the engine into etcd, under a lease. From then on Forwarders of the namespace
    use the engine, and `dynamo-lite ps` and `top` show it. While the engine is unhealthy, there is
    no record.

    To remove the engine, press Ctrl-C, send SIGTERM, or revoke the lease
    (scripts/revoke_lease.py). The command deletes the record, waits until the engine has no
    requests, at most --grace-s, and exits with code 0. Then you can stop the engine. If the
    command is killed, the record is gone after --lease-ttl-s. If etcd is out of reach for longer
    than that, it registers the engine again as soon as it can. Other exit codes: 1 etcd could not
    be reached at the start, 2 bad input, 70 its check of the engine failed, 130 a second signal.

    \b
    dynamo-lite join --url http://10.0.0.1:8100 --role prefill --protocol nixl \\
      --etcd-url 'https://etcd-1:2379?login=etcd-login' --certificates certificates
    """
    from dynamo_lite.cli.listing import OnGraph
    from dynamo_lite.forward.join import JoinOptions, run
    from dynamo_lite.runtime.process.component import ProcessSpec
    from dynamo_lite.serve.progress import Progress
    from dynamo_lite.serve.startup_checks import check_bind_host, check_urls

    if protocol == "neuron-static":
        raise ConfigError(
            ["--protocol: the engines of neuron-static are listed; use neuron-dynamic"]
        )
    try:
        options = JoinOptions(
            url=url,
            role="prefill-decode" if role == "both" else role,
            protocol=protocol,
            transfer_host=transfer_host,
            transfer_port=transfer_port,
            notify_port=notify_port,
            model=model,
            ca_file=ca_file,
            health_interval_s=health_interval_s,
        )
    except ValueError as exc:
        raise ConfigError([f"join: {exc}"]) from exc
    component = JOINED_AS[options.role]
    graph = OnGraph(
        state_dir=state_dir, etcd_url=etcd_url, namespace=namespace, certificates=certificates
    )
    place = graph.place(component)
    check_urls(None, place.etcd_url)
    if place.certificates() is None:
        check_bind_host(bind_host, place.namespace, "--bind-host", "--certificates")
    spec = ProcessSpec(
        namespace=place.namespace,
        component=component,
        instance=0,
        nats_url="",
        etcd_url=place.etcd_url,
        state_dir=str(state_dir),
        certificates=None if place.folder is None else str(place.folder.absolute()),
        bind_host=bind_host,
        lease_ttl_s=lease_ttl_s,
        grace_s=grace_s,
    )
    level = "DEBUG" if verbose else "INFO"
    raise typer.Exit(run(spec, options, Progress().line, level=level, log_format=log_format))
