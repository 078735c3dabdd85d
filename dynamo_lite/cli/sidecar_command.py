"""`dynamo-lite sidecar`: a server beside one stock decode engine."""

from typing import Annotated, Literal

import typer

from dynamo_lite.cli.arguments import LogLines, Verbose
from dynamo_lite.protocol.errors import ConfigError

#: Their engines learn each other's addresses from both legs, or from an answer.
SidecarProtocol = Literal["nixl", "nixl-push", "mooncake", "sglang", "moriio-read", "moriio-write"]


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
    verbose: Verbose = False,
    log_format: LogLines = "text",
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
    from dynamo_lite.forward.named import PRIVATE
    from dynamo_lite.forward.options import (
        EngineOptions,
        ForwarderConfig,
        SidecarConfig,
    )
    from dynamo_lite.forward.sidecar import run

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
            allowed=PRIVATE if allow_prefiller is None else _split(allow_prefiller),
            metrics_port=metrics_port,
        )
    except ValueError as exc:
        raise ConfigError([f"sidecar: {exc}"]) from exc
    level = "DEBUG" if verbose else "INFO"
    raise typer.Exit(run(config, grace_s=grace_s, level=level, log_format=log_format))


def _split(given: list[str]) -> tuple[str, ...]:
    """Raises ConfigError."""
    parts = [part.strip() for value in given for part in value.split(",")]
    if not any(parts):
        raise ConfigError(["--allow-prefiller: expected a host, an address or a network"])
    return tuple(part for part in parts if part)
