"""The options of `dynamo-lite simulate`: how many workers a load needs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_LOAD, _GRAPH, _OUTPUT = "Load", "Graph", "Output"


def simulate(
    workers: Annotated[
        str, typer.Option(metavar="xPyD", help="Prefill and decode workers, e.g. 2P3D.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File with requests: Mooncake JSONL, Azure or BurstGPT CSV, ShareGPT JSON.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="Made-up load instead: constant, step, ramp, burst or sine.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second of --load, or of a --trace without times.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    peak: Annotated[
        float | None,
        typer.Option(
            help="Most requests per second of --load; default: 4 x --rate.", rich_help_panel=_LOAD
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(help="How long --load lasts, in seconds.", rich_help_panel=_LOAD)
    ] = 600.0,
    prompt_tokens: Annotated[
        int, typer.Option(help="Median length of the prompts of --load.", rich_help_panel=_LOAD)
    ] = 2000,
    output_tokens: Annotated[
        int, typer.Option(help="Median length of the outputs of --load.", rich_help_panel=_LOAD)
    ] = 200,
    sigma: Annotated[
        float,
        typer.Option(help="Spread of these lengths (log-normal); 0: none.", rich_help_panel=_LOAD),
    ] = 0.5,
    shared_tokens: Annotated[
        int,
        typer.Option(
            help="Number of tokens that the prompts of each of 32 groups share.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    speed: Annotated[
        float, typer.Option(help="Play --trace this many times faster.", rich_help_panel=_LOAD)
    ] = 1.0,
    rate_scale: Annotated[
        float,
        typer.Option(
            help="Copies of each request of --trace; 0.5 leaves out half of them.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="FROM:TO",
            help="Play only this part of --trace; seconds from its first request.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Read at most this many requests of --trace.", rich_help_panel=_LOAD),
    ] = None,
    hash_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens that one hash of --trace, a block, stands for.", rich_help_panel=_LOAD
        ),
    ] = 512,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json for ShareGPT; without it four characters are a token.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of what is random; the same one gives the same report.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    timing: Annotated[
        str,
        typer.Option(
            help="Timing file of benchmarks/calibrate.py, or a shipped one: gpu_like, tiny_cpu.",
            rich_help_panel=_GRAPH,
        ),
    ] = "gpu_like",
    model: Annotated[
        str | None,
        typer.Option(help="Refuse a timing file of another model.", rich_help_panel=_GRAPH),
    ] = None,
    vllm_version: Annotated[
        str | None,
        typer.Option(
            help="Refuse a timing file of another vLLM; default: the installed one.",
            rich_help_panel=_GRAPH,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="More runs of the same load: planner, static:2P2D, local-only, oracle,"
            " script:0=1P1D+60=2P2D.",
            rich_help_panel=_GRAPH,
        ),
    ] = None,
    planner: Annotated[
        Path | None,
        typer.Option(
            help="Configuration whose `Planner` section the planner of --compare has; default: the"
            " shipped options, with --max-workers as the budget.",
            rich_help_panel=_GRAPH,
        ),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option(
            help="Budget of oracle and planner; default: twice --workers.", rich_help_panel=_GRAPH
        ),
    ] = None,
    start_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a worker takes to start; default: the timing's.",
            rich_help_panel=_GRAPH,
        ),
    ] = None,
    router: Annotated[
        Literal["round-robin", "random", "kv"],
        typer.Option(
            help="How a decode worker is chosen; as `router` of Frontend.", rich_help_panel=_GRAPH
        ),
    ] = "round-robin",
    max_local_prefill_length: Annotated[
        int,
        typer.Option(
            help="Prompts of at most this many uncached tokens are prefilled locally.",
            rich_help_panel=_GRAPH,
        ),
    ] = 512,
    max_prefill_queue_size: Annotated[
        int | None,
        typer.Option(
            help="With this many jobs in the queue all prompts are prefilled locally; default: 4"
            " per prefill worker, at least 8.",
            rich_help_panel=_GRAPH,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(help="Jobs that a prefill worker holds at a time.", rich_help_panel=_GRAPH),
    ] = 2,
    short_slots: Annotated[
        int,
        typer.Option(
            help="Short and urgent jobs that it holds beside these.", rich_help_panel=_GRAPH
        ),
    ] = 1,
    ttft_slo: Annotated[
        float,
        typer.Option(
            help="Target of the time to the first token, in seconds.", rich_help_panel=_OUTPUT
        ),
    ] = 2.0,
    itl_slo: Annotated[
        float,
        typer.Option(
            help="Target of a request's mean time between tokens, in seconds.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0.05,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON into this file.", rich_help_panel=_OUTPUT)
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="Draw load, workers, queue and attainment over time.", rich_help_panel=_OUTPUT
        ),
    ] = None,
) -> None:
    """Estimate how many workers a load needs, in simulated time.

    The shipped policies route, decide and queue; engines are a timing model. No process is
    started and no port is opened. What is modelled: docs/capacity.md.

    Exit code 0: done; 2: bad input; 130: interrupted, after printing the results so far.

    \b
    dynamo-lite simulate --workers 2P3D --load sine --rate 5
    dynamo-lite simulate --workers 2P3D --trace mooncake.jsonl --router kv
    dynamo-lite simulate --workers 2P3D --load step --rate 4 \\
        --compare planner,static:3P2D,oracle --svg curves.svg
    """
    options = dict(locals())
    from dynamo_lite.cli.capacity_run import Given, run

    outputs = ("as_json", "out", "svg")
    given = Given(**{name: value for name, value in options.items() if name not in outputs})
    raise typer.Exit(run(given, as_json=as_json, out=out, svg=svg))
