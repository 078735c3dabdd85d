"""Part `graph`: compares a graph's greedy tokens with those of plain vLLM.

Plain vLLM runs first and is stopped, so that one GPU is enough. With two GPUs each worker
has its own.
"""

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.graph import ROOT, TINY_MODEL, RunningGraph, end, running_graph
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
_NEW_TOKENS = 24
_READY_S, _ANSWER_S, _POLL_S = 400.0, 120.0, 0.2
_COMMITTED = 'dynamo_lite_remote_prefills_total{outcome="committed"}'


def graph(bench: Bench) -> Figures:
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    if bench.on_gpu and not _has_cuda_build():
        raise Skip("the installed vLLM is not a CUDA build")
    _make_model()
    prompts = [_prompt(length) for length in _PROMPTS]
    config = _CONFIGS[bench.kind]
    with plain_server(config) as url:
        expected = ask(url, prompts)
    with running_graph(_GRAPH, config, *_placement(bench)) as running:
        found = ask(running.run.http, prompts)
        committed = _committed(running, at_least=_remote(prompts))
    wrong = first_difference(expected, found)
    if wrong is not None:
        raise CheckFailed(wrong)
    if committed < _remote(prompts):
        raise CheckFailed(
            f"only {committed:g} of {_remote(prompts)} long prompts were prefilled remotely"
        )
    return {"prompts": len(prompts), "prefilled remotely": int(committed), "GPUs": bench.count}


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


def ask(url: str, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy tokens, one prompt after the other."""
    return [_complete(url, prompt) for prompt in prompts]


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


def _remote(prompts: Sequence[list[int]]) -> int:
    return sum(len(prompt) - 1 > 512 for prompt in prompts)


def _committed(running: RunningGraph, at_least: int) -> float:
    """Number of committed remote prefills; waits until the worker has counted `at_least`."""
    deadline = time.monotonic() + 10.0
    while True:
        count = running.metrics("VllmWorker").get(_COMMITTED, 0.0)
        if count >= at_least or time.monotonic() > deadline:
            return count
        time.sleep(_POLL_S)


@contextlib.contextmanager
def plain_server(config: str) -> Iterator[str]:
    """vLLM's own server with the arguments of the configuration's VllmWorker."""
    document = read_document(ROOT / config, [])
    worker = resolve(load_graph(_GRAPH), document).get("VllmWorker")
    document.raise_mistakes()
    assert worker is not None
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *engine_flags(worker.flags),
    ]
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **worker.env[0]}
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


def _placement(bench: Bench) -> list[str]:
    """Options for each worker's device."""
    if not bench.on_gpu:
        return []
    chosen = {"VllmWorker": 0, "PrefillWorker": min(1, bench.count - 1)}
    return [
        f"--{service}.ServiceArgs.env.CUDA_VISIBLE_DEVICES={_visible(index)}"
        for service, index in chosen.items()
    ]


def _visible(index: int) -> str:
    """The driver's name of this process's device number `index`."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[index] if seen else str(index)


def _has_cuda_build() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def _make_model() -> None:
    if not (TINY_MODEL / "recipe.json").exists():
        command = [sys.executable, "scripts/tiny_model.py", str(TINY_MODEL)]
        subprocess.run(command, cwd=ROOT, check=True)


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(5, 512) for _ in range(length)]
