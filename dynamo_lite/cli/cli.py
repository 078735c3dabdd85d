"""The command `dynamo-lite`.

Each command imports its heavy modules itself, so that `--help` is quick.
"""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dynamo_lite import __version__
from dynamo_lite.cli import (
    access,
    arguments,
    drain,
    explain,
    listing,
    live_options,
    planner,
    scale,
)
from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    EtcdUrl,
    Json,
    LogLines,
    Namespace,
    NatsUrl,
    StateDir,
    Verbose,
    interruptible,
    with_shared_options,
)
from dynamo_lite.cli.listing import OnGraph, Place, on_graph
from dynamo_lite.forward import commands as forward
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.store import Store


class _Commands(TyperGroup):
    """Handles Ctrl-C, SIGTERM and SIGHUP while no graph runs.

    A running graph has its own signal handlers.
    """

    def invoke(self, ctx: Any) -> Any:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # Shells start background jobs so, which is no wish to ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for kind in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(kind) is signal.SIG_DFL:
                signal.signal(kind, _as_ctrl_c)
        with interruptible("interrupted; nothing is left running"):
            return super().invoke(ctx)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Does what Ctrl-C does now: a running loop cancels its task.

    KeyboardInterrupt raised in the loop could break off the start of a child process, and the
    task would wait for that start without end.
    """
    if callable(handler := signal.getsignal(signal.SIGINT)):
        handler(number, frame)


app = typer.Typer(
    name="dynamo-lite",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Queue-driven conditional disaggregation for LLM serving on stock vLLM.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dynamo-lite {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del version
    context.obj = _process_of_graph  # for commands of other rooms


def _process_of_graph(
    component: str,
    *,
    state_dir: Path,
    etcd_url: str | None,
    namespace: str | None,
    certificates: Path | None,
    bind_host: str,
    **more: Any,
) -> Any:
    """The `ProcessSpec` of a process that a command runs. Raises StartupError, ConfigError."""
    from dynamo_lite.runtime.process.component import ProcessSpec
    from dynamo_lite.serve.startup_checks import check_bind_host, check_urls

    graph = OnGraph(
        state_dir=state_dir, etcd_url=etcd_url, namespace=namespace, certificates=certificates
    )
    place = graph.place(component)
    check_urls(None, place.etcd_url)
    if place.certificates() is None:
        check_bind_host(bind_host, place.namespace, "--bind-host", "--certificates")
    return ProcessSpec(
        namespace=place.namespace,
        component=component,
        instance=0,
        nats_url="",
        etcd_url=place.etcd_url,
        state_dir=str(state_dir),
        certificates=None if place.folder is None else str(place.folder.absolute()),
        bind_host=bind_host,
        **more,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    graph: Annotated[str, typer.Argument(help="Graph as MODULE:NAME, e.g. graphs.disagg:Frontend")],
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="YAML configuration file, yours or a packaged one."),
    ] = None,
    service_name: Annotated[str | None, typer.Option(help="Start only this service.")] = None,
    nats_url: NatsUrl = None,
    etcd_url: EtcdUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration; start nothing.")
    ] = False,
    verbose: Verbose = False,
    log_format: LogLines = "text",
    log_to: Annotated[
        Literal["files", "stderr"],
        typer.Option(help="Where the processes log: files of the state directory, or stderr."),
    ] = "files",
    allow_untested_vllm: Annotated[
        bool, typer.Option("--allow-untested-vllm", help="Start with any version of vLLM.")
    ] = False,
) -> None:
    """Start a graph of services and run it until Ctrl-C.

    --Service.key=value overrides one value of the file, for example --Frontend.port=8080 or
    --VllmWorker.ServiceArgs.workers=2. Without --nats-url and --etcd-url an embedded
    nats-server and etcd are started. `dynamo-lite examples` lists the packaged graphs and
    configuration files; those in the working directory go first.

    The first Ctrl-C (or SIGTERM) drains the graph: requests in flight finish, then the
    processes exit. A second one kills all processes.
    """
    from dynamo_lite.serve.command import check_arguments, run
    from dynamo_lite.serve.config import resolve
    from dynamo_lite.serve.document import read_document
    from dynamo_lite.serve.graphs import config_file, load_graph
    from dynamo_lite.serve.launches import ServeRequest
    from dynamo_lite.serve.startup_checks import check_planner, check_urls

    check_urls(nats_url, etcd_url)
    value = load_graph(graph)
    if file is not None and (found := config_file(file)) != file:
        print(f"{file}: the packaged file, {found}", file=sys.stderr)
        file = found
    named = [] if namespace is None else [f"--Graph.namespace={json.dumps(namespace)}"]
    document = read_document(file, [*context.args, *named])
    config = resolve(value, document, only=service_name)
    check_planner(config, document)
    if dry_run:
        check_arguments(config, document, allow_untested=allow_untested_vllm)
        print(_as_yaml(graph, config), end="")
        return
    request = ServeRequest(
        graph_name=graph,
        config=config,
        state_dir=state_dir,
        nats_url=nats_url,
        etcd_url=etcd_url,
        log_level="DEBUG" if verbose else "INFO",
        log_format=log_format,
        log_to_stderr=log_to == "stderr",
    )
    raise typer.Exit(run(request, document, allow_untested=allow_untested_vllm))


@app.command("examples")
def examples_(
    name: Annotated[
        str | None, typer.Argument(help="Print this one, e.g. configs/disagg.yaml.")
    ] = None,
) -> None:
    """List the packaged graphs and configuration files, or print one of them.

    `dynamo-lite serve` finds them from every folder by these names. To change one, copy it:

    \b
    dynamo-lite examples configs/disagg.yaml > my.yaml
    dynamo-lite serve graphs.disagg:Frontend -f my.yaml
    """
    from dynamo_lite.serve.graphs import examples

    found = examples()
    if name is None:
        print(listing.table(("name", "about"), [(n, about) for n, (_, about) in found.items()]))
    elif name in found:
        print(found[name][0].read_text(encoding="utf-8"), end="")
    else:
        raise ConfigError([f"{name}: no packaged graph or configuration has this name"])


@app.command()
@on_graph
def ps(graph: OnGraph, as_json: Json = False) -> None:
    """List the live processes of a graph and their state.

    STATE is ready, starting, draining, unwell (it cannot work; see its log), unfit (a prefill
    worker that fits no decode engine; `dynamo-lite top` shows why) or silent (its status server
    does not respond).
    """

    async def read_rows(store: Store, place: Place) -> list[dict[str, Any]]:
        records = await listing.members(store, place.namespace)
        return await listing.member_rows(records, place.certificates())

    rows = graph.on_store(read_rows)
    print(json.dumps(rows, indent=2) if as_json else listing.as_table(rows))


@app.command()
@on_graph
def top(
    graph: OnGraph,
    once: Annotated[bool, typer.Option("--once", help="Print one plain frame and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two frames.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON.")] = False,
) -> None:
    """Watch a running graph: workers, queue, decisions, latencies, transfers, failed links.

    RUNNING and WAITING count requests, for a prefill worker jobs. Rates cover the last 10
    seconds and latencies, which the Frontend measures, the last 60; with --once and --json
    both cover one --interval. A prefill worker takes no jobs over a failed link until NEXT TRY.
    TOTAL counts since the live workers started. Ctrl-C exits. The
    Frontend serves the same view at /dashboard. Of a Forwarder it shows requests, the engines
    that all Forwarders use per role, and answers per second: disaggregated, alone (and why) and
    passed on.

    \b
    dynamo-lite top
    dynamo-lite top --once --interval 10
    """
    # Rich's parts for a live display, and what reads the metrics.
    from dynamo_lite.cli.top import show

    place = graph.place()
    # This end is no failure. SIGTERM and SIGHUP do the same.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(place, interval, once=once or as_json, as_json=as_json))


# `--help` lists them in this order, behind those above.
app.command()(explain.explain)
app.command()(scale.scale)
app.command()(drain.drain)
app.add_typer(live_options.app, name="config")
app.add_typer(planner.app, name="planner")
app.add_typer(access.app, name="access")
app.command()(with_shared_options(forward.join))
app.command()(with_shared_options(forward.sidecar))


def _as_yaml(graph: str, config: Any) -> str:
    import yaml

    from dynamo_lite.serve.config import describe

    return yaml.safe_dump(
        {"graph": graph, **describe(config)}, sort_keys=False, default_flow_style=False
    )


def main() -> None:
    arguments.run(app)


if __name__ == "__main__":
    main()
