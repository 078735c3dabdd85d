"""LoRA adapters: remote prefills with them, and clients that load them for the whole graph."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dynamo_lite.protocol import names
from dynamo_lite.runtime.etcd.store import EtcdStore
from tests.vllm.adapter_files import write_adapter
from tests.vllm.asking import tokens_of
from tests.vllm.graph import NAMESPACE, Graph, PlainServer
from tests.vllm.slow import SLOW_OPTIONS, longs, outcomes
from tests.vllm.test_decisions import counting

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

#: Those of the configuration. Clients load another one, `late`.
GIVEN = ("one", "two")


@dataclass(frozen=True)
class Served:
    graph: Graph
    plain: PlainServer
    folder: Path

    async def load(self, name: str, path: Path | str) -> httpx.Response:
        return await self._post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))

    async def unload(self, name: str) -> httpx.Response:
        return await self._post("/v1/unload_lora_adapter", lora_name=name)

    async def models(self) -> set[str]:
        async with httpx.AsyncClient(base_url=self.graph.url) as http:
            answer = (await http.get("/v1/models")).json()
        return {model["id"] for model in answer["data"]}

    async def recorded(self) -> set[str]:
        async with EtcdStore(self.graph.etcd_url) as store:
            return set(await store.get_prefix(names.adapters_prefix(NAMESPACE)))

    async def _post(self, path: str, **body: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.graph.url, timeout=60) as http:
            return await http.post(path, json=body)


@pytest.fixture(scope="module")
def served(stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    stage.clear()
    directory = tmp_path_factory.mktemp("adapters")
    folder = directory / "folder"
    paths = {name: write_adapter(folder / name, seed) for seed, name in enumerate((*GIVEN, "late"))}
    given = json.dumps([f"{name}={paths[name]}" for name in GIVEN])
    options = [
        *(f"--{service}.enable-lora=true" for service in ("VllmWorker", "PrefillWorker")),
        *(f"--{service}.max-loras=2" for service in ("VllmWorker", "PrefillWorker")),
        *(f"--Frontend.lora-modules={given}", f"--Frontend.adapter-folder={folder}"),
    ]
    lora = {"enable-lora": True, "max-loras": 2, "max-lora-rank": 16}
    modules = [f"{name}={path}" for name, path in paths.items()]
    plain = PlainServer(directory / "plain", flags={**lora, "lora-modules": modules})
    graph = Graph(directory / "graph", options=[*SLOW_OPTIONS, *options])
    with plain, graph:
        yield Served(graph, plain, folder)


async def test_answers_with_adapters_are_those_of_a_plain_engine(served: Served):
    """The same prompts with each adapter and without: none gets KV that another one computed.

    Prompts with and without an adapter are never in one step: vLLM's CPU kernels then use an
    adapter for all of them.
    """
    prompts = longs(4, seed=1500)
    requests = [{**prompt, "model": name} for prompt in prompts for name in ("tiny", *GIVEN)]
    expected = await tokens_of(served.plain.url, requests, 1)
    assert len({tuple(tokens) for tokens in expected}) == len(requests), "adapters tell"
    since = counting(served.graph)
    assert await tokens_of(served.graph.url, requests, 1) == expected
    assert since() == {"remote/long": len(requests)}
    adapted = [i for i, request in enumerate(requests) if request["model"] != "tiny"]
    again = await tokens_of(served.graph.url, [requests[i] for i in adapted])
    assert again == [expected[i] for i in adapted]
    assert since()["local/cached"] == len(adapted), "each is in the prefix cache"
    assert outcomes(served.graph, "committed") == len(requests)
    assert not served.graph.errors()


async def test_a_client_loads_an_adapter_for_the_graph_and_unloads_it(served: Served):
    request = {**longs(1, seed=1520)[0], "model": "late"}
    path = served.folder / "late"
    answer = await served.load("late", path)
    assert answer.status_code == 200, answer.text
    assert await served.models() == {"tiny", *GIVEN, "late"}
    assert await served.recorded() == {names.adapter_key(NAMESPACE, "late")}
    assert await tokens_of(served.graph.url, [request]) == await tokens_of(
        served.plain.url, [request]
    )
    again = await served.load("late", path)
    assert again.status_code == 400 and "already been loaded" in again.text
    assert (await served.unload("late")).status_code == 200
    assert await served.models() == {"tiny", *GIVEN}
    assert await served.recorded() == set()
    gone = await served.unload("late")
    assert gone.status_code == 400 and "no client has loaded" in gone.text
