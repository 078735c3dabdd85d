"""Pictures of a running graph for the README: the page /dashboard as PNG, `top` as SVG.

    python -m benchmarks.screenshot [--state-dir .dynamo-lite] [--out docs/watching]

Sends a mix of long and short prompts to the graph that runs on the state directory
(graphs.disagg:Frontend with configs/disagg.yaml), and takes both while it works on them.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import threading
import urllib.request
from pathlib import Path

from rich.console import Console

from benchmarks.browser import find_chromium, open_page
from dynamo_lite.cli.listing import Place, open_store
from dynamo_lite.cli.top import as_frame
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.serve.run_state import RunState, read_run

_SECONDS, _BETWEEN_S = 60, 10.0
_CLIENTS = 3


def _send(url: str, seed: int, stop: threading.Event) -> None:
    """One client: a prompt after the other, of which some are long."""
    rng = random.Random(seed)
    while not stop.is_set():
        length = rng.choice((20, 60, 200, 900, 1600, 2400))
        prompt = [rng.randrange(5, 512) for _ in range(length)]
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 48}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        stop.wait(rng.expovariate(1.0))


async def _top(run: RunState) -> Console:
    """A frame of `dynamo-lite top`, recorded. Both looks are some seconds apart."""
    place = Place(etcd_url=run.etcd, namespace=run.namespace)
    async with (
        open_store(place) as store,
        Observer(store, place.namespace, certificates=place.certificates()) as observer,
    ):
        await observer.look()
        await asyncio.sleep(_BETWEEN_S)
        seen = await observer.look()
    with Path("/dev/null").open("w") as nowhere:
        console = Console(
            record=True, width=80, force_terminal=True, color_system="truecolor", file=nowhere
        )
        console.print(as_frame(seen))
    return console


def _without_fonts(svg: str) -> str:
    """rich names fonts that would be fetched from elsewhere; any monospaced one will do."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state-dir", type=Path, default=Path(".dynamo-lite"))
    parser.add_argument("--out", type=Path, default=Path("docs/watching"))
    parser.add_argument("--seconds", type=int, default=_SECONDS)
    args = parser.parse_args()
    run, program = read_run(args.state_dir), find_chromium()
    if run is None or program is None:
        sys.exit(f"no graph on {args.state_dir}" if run is None else "no chromium is installed")
    args.out.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    senders = [
        threading.Thread(target=_send, args=(run.http, seed, stop)) for seed in range(_CLIENTS)
    ]
    for sender in senders:
        sender.start()
    try:
        with open_page(program, height=760) as page:
            page.goto(f"{run.http}/dashboard")
            page.wait_for_selector("#connection[data-state=live]")
            page.wait_for_timeout(args.seconds * 1000)
            page.screenshot(path=args.out / "dashboard.png", full_page=True)
        picture = asyncio.run(_top(run)).export_svg(title="dynamo-lite top")
        (args.out / "top.svg").write_text(_without_fonts(picture))
    finally:
        stop.set()
        for sender in senders:
            sender.join()


if __name__ == "__main__":
    main()
