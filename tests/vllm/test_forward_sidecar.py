"""A sidecar beside a stock vLLM engine with NixlConnector; requests name the prefill engine."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import reserved_port
from tests.vllm.asking import ask, prose
from tests.vllm.conftest import Stage
from tests.vllm.graph import Command, eventually, sample_sum
from tests.vllm.stock import StockEngine

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("stock")]


class Sidecar(Command):
    def __init__(self, directory: Path, decode: StockEngine):
        self.port, self.metrics_port = reserved_port(), reserved_port()
        super().__init__(
            directory,
            [
                *(sys.executable, "-m", "dynamo_lite.cli.cli", "sidecar"),
                *("--decode", decode.url, "--protocol", "nixl", "--port", str(self.port)),
                *("--metrics-port", str(self.metrics_port)),
            ],
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def answers(self, how: str) -> float:
        status = f"http://127.0.0.1:{self.metrics_port}"
        return sample_sum(status, "dynamo_lite_forward_answers_total", how=how)


@dataclass
class Running:
    sidecar: Sidecar
    prefill: StockEngine
    decode: StockEngine

    def asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of the sidecar, with the header."""
        host = self.prefill.url.removeprefix("http://")
        answer = httpx.post(
            f"{self.sidecar.url}/v1/completions",
            json={"model": "tiny", **body},
            headers={"x-prefiller-host-port": host},
            timeout=60,
        )
        return answer.raise_for_status().json()


@pytest.fixture(scope="module")
def running(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    stock = stage.stock()
    sidecar = Sidecar(tmp_path_factory.mktemp("sidecar"), stock.decode)
    sidecar.start()
    try:
        eventually(sidecar.is_ready, timeout_s=60, what="the sidecar")
        yield Running(sidecar, stock.prefill, stock.decode)
    finally:
        sidecar.end()


def test_answers_are_those_of_the_decode_engine(running: Running):
    for seed in (1, 2):
        body: dict[str, Any] = {"prompt": prose(300, seed=seed), "max_tokens": 12, "temperature": 0}
        before = running.sidecar.answers("disaggregated")
        shown = running.asked(body)["choices"][0]["text"]
        assert running.sidecar.answers("disaggregated") == before + 1
        assert shown == ask(running.decode.url, "completions", body)["choices"][0]["text"] != ""


@pytest.mark.takes_workers
def test_a_dead_prefill_engine_costs_no_answer(running: Running):
    """The engine does not come back."""
    before = running.sidecar.answers("alone")
    running.prefill.kill()
    body: dict[str, Any] = {"prompt": prose(300, seed=3), "max_tokens": 12, "temperature": 0}
    shown = running.asked(body)["choices"][0]["text"]
    assert running.sidecar.answers("alone") == before + 1
    assert shown == ask(running.decode.url, "completions", body)["choices"][0]["text"] != ""
