"""The commands `dynamo-lite join` and `dynamo-lite sidecar`.

`cli/` adds them to the command line. It replaces the plain types of the options that all commands
share, and finds the graph.
"""

import logging.config
from pathlib import Path
from typing import Annotated, Literal

import typer

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.forwarding import JOINED_AS, ProtocolName
from dynamo_lite.protocol.records import LAST_PORT
from dynamo_lite.runtime.process.logs import LogFormat, logging_config

JoinRole = Literal["prefill", "decode", "prefill-decode", "both"]
#: Their engines learn each other's addresses from both legs, or from an answer.
SidecarProtocol = Literal["nixl", "nixl-push", "mooncake", "sglang", "moriio-read", "moriio-write"]


def join(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="The engine's OpenAI server, http(s)://HOST:PORT, for Forwarders.")
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
    namespace: str | None = None,
    etcd_url: str | None = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="The graph's certificates: a folder with ca.pem and, by --role, the pair of"
            " Engine, PrefillEngine or DecodeEngine. Needed if --bind-host is no loopback address."
        ),
    ] = None,
    state_dir: Path = Path(".dynamo-lite"),
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
    verbose: bool = False,
    log_format: LogFormat = "text",
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
    from dynamo_lite.forward.join import JoinOptions, register
    from dynamo_lite.runtime.process.component import ProcessSpec
    from dynamo_lite.runtime.process.stop import run_loop

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
    spec: ProcessSpec = context.obj(
        JOINED_AS[options.role],
        state_dir=state_dir,
        etcd_url=etcd_url,
        namespace=namespace,
        certificates=certificates,
        bind_host=bind_host,
        lease_ttl_s=lease_ttl_s,
        grace_s=grace_s,
    )
    _log(spec.component, log_format, verbose=verbose)
    raise typer.Exit(run_loop(register(spec, options)))


def sidecar(
    decode: Annotated[
        str, typer.Option(metavar="URL", help="The decode engine's server.")
    ] = "http://127.0.0.1:8200",
    protocol: Annotated[SidecarProtocol, typer.Option(help="How KV is handed over.")] = "nixl",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 in a pod.")
    ] = "127.0.0.1",
    allow_prefiller: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST|CIDR",
            help="A host, address or network that the header may name; may be repeated."
            " (default: private and loopback addresses)",
        ),
    ] = None,
    prefill_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Longest time of a whole prefill leg, in seconds.")
    ] = 120.0,
    idle_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Longest time without a byte of an answer, in seconds.")
    ] = 600.0,
    transfer_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="The prefill engines' bootstrap port (mooncake, sglang: 8998)."
        ),
    ] = None,
    transfer_host: Annotated[
        str | None, typer.Option(help="This host's address as prefill engines see it (moriio).")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="PEM file of the own certificate: serves HTTPS.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its private key.")] = None,
    prefiller_https: Annotated[bool, typer.Option(help="Prefill engines speak HTTPS.")] = False,
    ca_file: Annotated[
        str | None,
        typer.Option(help="PEM file of the engines' authorities. (default: the system's)"),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest body of a request, in bytes.")
    ] = 32 << 20,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the own metrics; 0: none.")
    ] = 0,
    grace_s: Annotated[
        float, typer.Option(min=0, help="How many seconds open answers may take after SIGTERM.")
    ] = 30.0,
    verbose: bool = False,
    log_format: LogFormat = "text",
) -> None:
    """Stand beside one stock decode engine, and hand prompts to prefill engines.

    Each request names its prefill engine in `x-prefiller-host-port: HOST:PORT` (of several the
    first healthy one is taken). That engine computes the prompt; the decode engine goes on with
    its KV. Without the header, or when the prefill engine fails, the decode engine does all.
    Routes that generate nothing pass through as they are. `/health`, `/live` and `/ready`
    are its own. It needs neither etcd nor NATS.

    It can stand where llm-d's routing sidecar stands; its documentation compares the flags.

    The first SIGTERM or Ctrl-C drains: open answers may finish within --grace-s, then it
    exits with 0. A second one ends it at once, with 130.

    \b
    dynamo-lite sidecar --decode http://127.0.0.1:8200 --protocol nixl
    curl http://127.0.0.1:8000/v1/completions \\
      -H 'x-prefiller-host-port: 127.0.0.1:8100' \\
      -H 'Content-Type: application/json' \\
      -d '{"model": "MODEL", "prompt": "Once upon a time"}'
    """
    import uvloop

    from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
    from dynamo_lite.forward.sidecar import PRIVATE, SidecarConfig, serve

    if ca_file and not (prefiller_https or decode.startswith("https:")):
        raise ConfigError(["--ca-file: no engine uses HTTPS (--decode, --prefiller-https)"])
    try:
        decoder = EngineOptions(
            url=decode,
            role="decode",
            transfer_host=transfer_host,
            ca_file=ca_file if decode.startswith("https:") else None,
        )
        prefillers = EngineOptions(
            url=f"{'https' if prefiller_https else 'http'}://localhost:1",
            role="prefill",
            transfer_port=transfer_port,
            ca_file=ca_file if prefiller_https else None,
        )
        config = SidecarConfig(
            forwarder=ForwarderConfig(
                host=host,
                port=port,
                tls_cert=tls_cert,
                tls_key=tls_key,
                protocol=protocol,
                engines=(decoder,),
                prefill_timeout_s=prefill_timeout_s,
                idle_timeout_s=idle_timeout_s,
                max_body_bytes=max_body_bytes,
            ),
            prefillers=prefillers,
            allowed=tuple(",".join(allow_prefiller or PRIVATE).split(",")),
            metrics_port=metrics_port,
        )
    except ValueError as exc:
        raise ConfigError([f"sidecar: {exc}"]) from exc
    _log("sidecar", log_format, verbose=verbose)
    raise typer.Exit(uvloop.run(serve(config, grace_s)))


def _log(component: str, form: LogFormat, *, verbose: bool) -> None:
    level = "DEBUG" if verbose else "INFO"
    logging.config.dictConfig(logging_config(form, component, 0, level=level))
