"""A whole graph in which each service has only the rights that `dynamo-lite access` prints."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.least_rights import LeastRights, least_rights
from tests.vllm.asking import ask, prompt_ids
from tests.vllm.graph import NAMESPACE, UNCOMPILED, Graph, eventually, together

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

_WORKERS = ("VllmWorker", "PrefillWorker")


@pytest.fixture(scope="module")
def graph(
    stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LeastRights, dict[str, Graph]]]:
    stage.clear()
    directory = tmp_path_factory.mktemp("access")
    with least_rights(directory, NAMESPACE) as rights:
        services = {
            name: Graph(
                directory / name,
                options=[
                    *rights.options(name),
                    "--Frontend.router=kv",
                    "--Graph.lease-ttl-s=60",
                    *(
                        f"--{worker}.ServiceArgs.env.{key}={value}"
                        for worker in _WORKERS
                        for key, value in UNCOMPILED.items()
                    ),
                ],
                service=name,
            )
            for name in ("Frontend", *_WORKERS)
        }
        with together(list(services.values())):
            yield rights, services


def command(rights: LeastRights, *arguments: str) -> str:
    """Output of a command of `dynamo-lite`, as the operator."""
    place = list(arguments)
    options = rights.options("Operator")
    if arguments[0] in ("ps", "config"):
        options = options[2:]
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_lite.cli.cli", *place, *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def remote(decode: Graph) -> float:
    return decode.count("VllmWorker", "dynamo_lite_remote_prefills_total", outcome="committed")


def test_remote_prefill_works(graph):
    rights, services = graph
    decode, url = services["VllmWorker"], services["Frontend"].url
    for seed in range(3):
        ask(url, "completions", {"prompt": prompt_ids(1500, seed), "max_tokens": 4})
    assert remote(decode) == 3
    ask(url, "completions", {"prompt": prompt_ids(20, 9), "max_tokens": 4})
    assert rights.violations() == []


def test_a_killed_worker_s_lease_is_revoked_and_nothing_is_refused(graph):
    rights, services = graph
    prefill = services["PrefillWorker"]
    victim = prefill.process("PrefillWorker")
    os.kill(victim.pid, signal.SIGKILL)
    eventually(
        lambda: victim.lease not in command(rights, "ps"), timeout_s=30, what="the key is gone"
    )
    eventually(
        lambda: prefill.process("PrefillWorker").state == "ready", timeout_s=180, what="it is back"
    )
    decode, url = services["VllmWorker"], services["Frontend"].url
    before = remote(decode)

    def served() -> bool:
        ask(url, "completions", {"prompt": prompt_ids(1500, len(seeds) + 30), "max_tokens": 4})
        seeds.append(0)
        return remote(decode) > before

    seeds: list[int] = []
    eventually(served, timeout_s=60, what="a remote prefill by the new process")
    assert rights.violations() == []
    for service in services.values():
        assert "was not revoked" not in service.output
        for log in service.directory.glob("**/logs/*.log"):
            text = log.read_text(errors="replace").lower()
            assert "permission denied" not in text and "permissions violation" not in text, log
