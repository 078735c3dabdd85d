"""Parts `graph`, `overlap`, `sliding`, `experts`: a graph's greedy tokens against plain vLLM's.

Plain vLLM runs first and is stopped, so that one GPU is enough. With two GPUs each worker
has its own; `experts` needs four.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.graph import ROOT, TINY_MODEL, RunningGraph, end, running_graph
from dynamo_lite.protocol import names
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.serve.config import resolve
from dynamo_lite.serve.document import read_document
from dynamo_lite.serve.graphs import load_graph
from dynamo_lite.serve.processes import free_port
from dynamo_lite.vllm.args import engine_flags
from gpu_check.bench import Bench
from gpu_check.report import CheckFailed, Figures, Skip

_GRAPH = "graphs.disagg:Frontend"
_CONFIGS = {"cuda": "configs/gpu_check.yaml", "cpu": "configs/disagg.yaml"}
#: Prompt lengths in tokens. Those over 512 are prefilled remotely.
_PROMPTS = (40, 300, 600, 1500, 1501, 2200, 700, 4000)
_SERVICES = ("VllmWorker", "PrefillWorker")
#: Tokens of a block in _CONFIGS.
_LONGEST_BLOCK = 64
#: Few more blocks than vLLM wants for one step and a window.
_SMALL_POOLS = {"cuda": 24, "cpu": 80}
_NEW_TOKENS = 24
#: Characters of a log that a failure shows.
_TAIL = 2000
_READY_S, _ANSWER_S, _POLL_S = 400.0, 120.0, 0.2
_COMMITTED = 'dynamo_lite_remote_prefills_total{outcome="committed"}'


def graph(bench: Bench) -> Figures:
    """Also: the decode engine names the attention backend that vLLM has chosen."""
    return _compared(bench, Trial(_PROMPTS))


def overlap(bench: Bench) -> Figures:
    """The same with asynchronous scheduling and Model Runner V2, several prompts at a time."""
    if not bench.on_gpu:
        raise Skip("vLLM has neither on a CPU")
    options = [
        option
        for service in _SERVICES
        for option in (
            f"--{service}.async-scheduling=true",
            f"--{service}.ServiceArgs.env.VLLM_USE_V2_MODEL_RUNNER=1",
        )
    ]
    return _compared(bench, Trial(_PROMPTS, options=options, at_once=4, said="V2 Model Runner"))


def sliding(bench: Bench) -> Figures:
    """The same for a model whose layers all have a sliding window, with prompts that end at each
    place of a block. A small pool soon takes again the blocks that are behind the window, and must
    not before they are written."""
    lengths = range(640, 640 + _LONGEST_BLOCK)
    pool = f"--PrefillWorker.num-gpu-blocks-override={_SMALL_POOLS[bench.kind]}"
    return _compared(bench, Trial(lengths, model="sliding", options=[pool], at_once=8))


def experts(bench: Bench) -> Figures:
    """The same for a model of experts, whose two data-parallel ranks share them: a rank that waits
    for KV must not keep the other one from computing, or from sleeping."""
    if not bench.on_gpu or bench.count < 4:
        raise Skip("it needs four GPUs")
    options = [
        option
        for service in _SERVICES
        for option in (
            f"--{service}.data-parallel-size=2",
            f"--{service}.enable-expert-parallel=true",
        )
    ]
    trial = Trial(_PROMPTS, model="experts", options=options, at_once=4, ranks=2)
    return _compared(bench, trial)


@dataclass(frozen=True)
class Trial:
    """What a graph is asked, to be compared with plain vLLM.

    prompts: their lengths in tokens. model: a shape of `scripts/tiny_model.py`. options: of the
    graph. at_once: prompts. said: what the engines' logs must have. ranks: devices of a worker.
    """

    prompts: Sequence[int]
    model: str = "tiny"
    options: Sequence[str] = ()
    at_once: int = 1
    said: str = ""
    ranks: int = 1

    @property
    def remote(self) -> int:
        """How many of them are prefilled remotely."""
        return sum(length - 1 > 512 for length in self.prompts)


def _compared(bench: Bench, trial: Trial) -> Figures:
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    if bench.on_gpu and not _has_cuda_build():
        raise Skip("the installed vLLM is not a CUDA build")
    model = TINY_MODEL.parent / trial.model
    subprocess.run(
        [sys.executable, "scripts/tiny_model.py", model, trial.model], cwd=ROOT, check=True
    )
    prompts = [_prompt(length) for length in trial.prompts]
    config, placed = (
        _CONFIGS[bench.kind],
        [f"--Common.model={model}", *_placement(bench, trial.ranks)],
    )
    placed.append("--VllmWorker.max-prefill-queue-size=1000")
    with plain_server(config, model) as url:
        expected = ask(url, prompts)
    with running_graph(_GRAPH, config, *placed, *trial.options) as running:
        found = ask(running.run.http, prompts, at_once=trial.at_once)
        committed = _committed(running, at_least=trial.remote)
        logs = {
            name: Path(running.process(name).log).read_text("utf-8", "replace")
            for name in _SERVICES
        }
        try:
            check(trial, expected, found, committed, logs)
            attention = named(asyncio.run(_attention(running)))
        except CheckFailed as exc:
            tails = [f"end of the log of {name}:\n{text[-_TAIL:]}" for name, text in logs.items()]
            raise CheckFailed("\n".join([str(exc), *tails])) from exc
    return {
        "prompts": len(prompts),
        "prefilled remotely": int(committed),
        "attention": attention,
        "GPUs": bench.count,
    }


def check(
    trial: Trial,
    expected: Sequence[list[int]],
    found: Sequence[list[int]],
    committed: float,
    logs: Mapping[str, str],
) -> None:
    """Raises CheckFailed. expected, found: tokens of plain vLLM and of the graph. committed: number
    of remote prefills. logs: of the workers, by service."""
    wrong = first_difference(expected, found)
    if wrong is not None:
        raise CheckFailed(wrong)
    if committed < trial.remote:
        raise CheckFailed(
            f"only {committed:g} of {trial.remote} long prompts were prefilled remotely"
        )
    for service, text in logs.items():
        if trial.said not in text:
            raise CheckFailed(f"the log of {service} does not have {trial.said!r}: it was not used")


def named(attention: str) -> str:
    """Returns the backend that the decode engine's fingerprint names. Raises CheckFailed."""
    if attention in ("", "None"):
        raise CheckFailed(
            f"the decode engine's fingerprint has attention {attention!r}: it does not name the"
            " backend that vLLM has chosen"
        )
    return attention


async def _attention(running: RunningGraph) -> str:
    async with EtcdStore(running.run.etcd) as store:
        found = await store.get_prefix(names.nixl_metadata_prefix(running.run.namespace))
    return decode_engine(next(iter(found.values()))).fingerprint.get("attention", "")


def first_difference(expected: Sequence[list[int]], found: Sequence[list[int]]) -> str | None:
    """Describes the first difference between two servers' tokens; None without one."""
    for number, (right, got) in enumerate(zip(expected, found, strict=True)):
        at = 0
        while right[at : at + 1] == got[at : at + 1] != []:
            at += 1
        if right != got:
            return (
                f"prompt {number}: plain vLLM and the graph differ from new token {at} on:"
                f" {right[at:][:4]} and {got[at:][:4]}"
            )
    return None


def ask(url: str, prompts: Sequence[list[int]], *, at_once: int = 1) -> list[list[int]]:
    """Greedy tokens of each prompt. at_once: so many prompts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(_complete, url), prompts))


def _complete(url: str, prompt: list[int]) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": _NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as exc:
        text = exc.read().decode(errors="replace")[:500]
        raise CheckFailed(f"a prompt of {len(prompt)} tokens: {exc}: {text}") from exc


def _committed(running: RunningGraph, at_least: int) -> float:
    """Number of committed remote prefills; waits until the worker has counted `at_least`."""
    deadline = time.monotonic() + 10.0
    while True:
        count = running.metrics("VllmWorker").get(_COMMITTED, 0.0)
        if count >= at_least or time.monotonic() > deadline:
            return count
        time.sleep(_POLL_S)


@contextlib.contextmanager
def plain_server(config: str, model: Path) -> Iterator[str]:
    """vLLM's own server with the arguments of the configuration's VllmWorker."""
    document = read_document(ROOT / config, [f"--Common.model={model}"])
    worker = resolve(load_graph(_GRAPH), document).get("VllmWorker")
    document.raise_mistakes()
    assert worker is not None
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *engine_flags(worker.flags),
    ]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **worker.env}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        log_path = Path(folder) / "plain.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        url = f"http://127.0.0.1:{port}"
        try:
            _until_healthy(process, url, log_path)
            yield url
        finally:
            end(process)


def _until_healthy(process: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        time.sleep(_POLL_S)
    tail = log_path.read_text(errors="replace").splitlines()[-15:]
    raise CheckFailed(f"plain vLLM was not ready within {_READY_S:g} s:\n" + "\n".join(tail))


def _placement(bench: Bench, ranks: int) -> list[str]:
    """Options for each worker's devices."""
    if not bench.on_gpu:
        return []
    chosen = {"VllmWorker": 0, "PrefillWorker": min(ranks, bench.count - ranks)}
    return [
        f"--{service}.ServiceArgs.env.CUDA_VISIBLE_DEVICES={','.join(map(_visible, devices))}"
        for service, first in chosen.items()
        for devices in [range(first, first + ranks)]
    ]


def _visible(index: int) -> str:
    """The driver's name of this process's device number `index`."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[index] if seen else str(index)


def _has_cuda_build() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(5, 512) for _ in range(length)]
