"""LoRA adapters at an engine, and in the Frontends' lists of models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import ConfigError, Refused, StoreUnavailable
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.runtime.drops import uncounted
from dynamo_lite.vllm.engine import adapters
from dynamo_lite.vllm.engine.adapters import Adapters
from dynamo_lite.vllm.frontend.graph_adapters import AdapterStore, GraphAdapters
from tests.builders import eventually
from tests.twins.servers import MemoryStore


def write(folder: Path, content: str = "weights") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return str(folder)


class Engine:
    """Loads every adapter, or fails with `error`."""

    def __init__(self) -> None:
        self.asked: list[LoRARequest] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def add(self, request: LoRARequest) -> bool:
        self.asked.append(request)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return True


async def test_an_engine_loads_each_adapter_once_under_a_number_of_its_own(tmp_path: Path):
    engine = Engine()
    adapters = Adapters(engine.add)
    one = Adapter(name="one", path=write(tmp_path / "one"))
    same_files = Adapter(name="one", path=write(tmp_path / "copy"))
    other = Adapter(name="two", path=write(tmp_path / "two", "others"))
    loaded = [await adapters.load(each) for each in (one, same_files, other, one)]
    assert len(engine.asked) == 3
    assert len({request.lora_int_id for _, request in loaded}) == 3
    # vLLM's steps take adapters of one name for one, and routers hash what events name.
    assert {request.lora_name for _, request in loaded} == {one.key, same_files.key, other.key}
    assert len({request for _, request in loaded}) == 3
    digests = [found.digest for found, _ in loaded]
    assert digests[0] == digests[1] == digests[3] != digests[2]


async def test_the_number_of_a_load_that_was_cancelled_is_not_given_again(tmp_path: Path):
    """The engine may have loaded it, and would take a second adapter of the number for it."""
    engine = Engine()
    adapters = Adapters(engine.add)
    engine.may_answer.clear()
    first = asyncio.create_task(adapters.load(Adapter(name="a", path=write(tmp_path / "a"))))
    await eventually(lambda: engine.asked)
    first.cancel()
    engine.may_answer.set()
    _, request = await adapters.load(Adapter(name="b", path=write(tmp_path / "b", "others")))
    assert request.lora_int_id != engine.asked[0].lora_int_id


async def test_other_files_than_the_decode_workers_are_refused(tmp_path: Path):
    adapters = Adapters(Engine().add)
    path = write(tmp_path / "a")
    found, _ = await Adapters(Engine().add).load(Adapter(name="a", path=path))
    assert (await adapters.load(found))[0] == found
    write(tmp_path / "a", "changed")
    with pytest.raises(Refused, match="its files differ from those of the decode worker"):
        await Adapters(Engine().add).load(found)


async def test_files_that_have_changed_since_the_load_are_refused(tmp_path: Path):
    adapters, path = Adapters(Engine().add), write(tmp_path / "a")
    adapter = Adapter(name="a", path=path)
    await adapters.load(adapter)
    write(tmp_path / "a", "other weights")
    with pytest.raises(Refused, match="its files have changed"):
        await adapters.load(adapter)


async def test_files_that_cannot_be_read_any_more_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unreadable(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    loaded, adapter = Adapters(Engine().add), Adapter(name="a", path=write(tmp_path / "a"))
    await loaded.load(adapter)
    monkeypatch.setattr(adapters, "_look", unreadable)
    with pytest.raises(Refused, match="Permission denied"):
        await loaded.load(adapter)


async def test_requests_share_a_load_and_its_error(tmp_path: Path):
    engine = Engine()
    engine.error = ValueError("no")
    adapters, adapter = Adapters(engine.add), Adapter(name="a", path=write(tmp_path / "a"))
    got = await asyncio.gather(*(adapters.load(adapter) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(each, Refused) for each in got) and len(engine.asked) == 1


@pytest.mark.parametrize(
    ("error", "elsewhere"), [(None, True), (Exception("Call to add_lora method failed: no"), False)]
)
async def test_what_cannot_be_loaded_is_refused_and_tried_again(
    tmp_path: Path, error: Exception | None, elsewhere: bool
):
    engine = Engine()
    engine.error = error
    path = tmp_path / "a" if error is None else Path(write(tmp_path / "a"))
    adapters, adapter = Adapters(engine.add), Adapter(name="a", path=str(path))
    with pytest.raises(Refused, match=r"'a' at .*/a: (no$|\[Errno 2\])") as refused:
        await adapters.load(adapter)
    assert refused.value.elsewhere is elsewhere
    engine.error = None
    write(tmp_path / "a")
    assert (await adapters.load(adapter))[0].name == "a"


class Client:
    """An engine client whose workers load every adapter, or fail with `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.model_config = self.vllm_config = SimpleNamespace(max_model_len=100)
        self.renderer = self.input_processor = None

    async def add_lora(self, request: LoRARequest) -> bool:
        return True

    async def generate(self, *asked: Any, lora_request: LoRARequest) -> AsyncIterator[None]:
        if self.error is not None:
            raise self.error
        yield None


class Graph:
    """Frontends over one store."""

    def __init__(self, store: MemoryStore, folder: Path, stack: AsyncExitStack):
        self.store, self.folder, self._stack = store, folder, stack
        self.client = Client()

    async def frontend(self) -> tuple[GraphAdapters, OpenAIServingModels]:
        base: Any = BaseModelPath(name="tiny", model_path="tiny")
        models = OpenAIServingModels(self.client, [base])
        records = AdapterStore(self.store, "t", str(self.folder), uncounted)
        adapters = GraphAdapters(records, models, self.client)
        await self._stack.enter_async_context(adapters.following())
        return adapters, models


@pytest.fixture
async def graph(tmp_path: Path) -> AsyncIterator[Graph]:
    async with AsyncExitStack() as stack:
        yield Graph(MemoryStore(), tmp_path, stack)


def asked(name: str, path: str | Path, **more: Any) -> LoadLoRAAdapterRequest:
    return LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), **more)


async def test_all_frontends_know_an_adapter_until_it_is_unloaded(graph: Graph):
    path = write(graph.folder / "a")
    (one, _), (two, second) = await graph.frontend(), await graph.frontend()
    assert "added successfully" in str(await one.load(asked("a", path)))
    await eventually(lambda: "a" in second.lora_requests)
    assert "has already been loaded" in str(await two.load(asked("a", path)))
    _, third = await graph.frontend()
    assert third.lora_requests["a"].lora_path == path, "a later one, too"
    await two.unload(UnloadLoRAAdapterRequest(lora_name="a"))
    await eventually(lambda: not third.lora_requests)
    assert not second.lora_requests and not await graph.store.get_prefix("t/")
    with pytest.raises(VLLMValidationError, match="no client has loaded"):
        await two.unload(UnloadLoRAAdapterRequest(lora_name="a"))


async def test_another_path_of_a_name_is_taken_over(graph: Graph):
    _, models = await graph.frontend()
    key = names.adapter_key("t", "a")
    for path in (write(graph.folder / "a"), write(graph.folder / "b")):
        await graph.store.put(key, encode_json(Adapter(name="a", path=path)))
        await eventually(
            lambda path=path: (
                "a" in models.lora_requests and models.lora_requests["a"].lora_path == path
            )
        )
    await graph.store.put(key, b"{}")
    for name, holds in (("b", ("c", path)), ("e", ("e", "/etc")), ("d", ("d", path))):
        record = encode_json(Adapter(name=holds[0], path=holds[1]))
        await graph.store.put(names.adapter_key("t", name), record)
    await eventually(lambda: "d" in models.lora_requests)
    assert set(models.lora_requests) == {"a", "d"}, "bad records change nothing"


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("relative", {}, "is not below"),
        ("{folder}", {}, "is not below"),
        ("{folder}/../other", {}, "is not below"),
        ("{folder}/link", {}, "is not below"),
        ("{folder}/a/../a", {}, "is not below"),
        ("{folder}/a\0", {}, "embedded null"),
        ("{folder}/" + 300 * "a", {}, "File name too long"),
        ("{folder}/nothing", {}, "has no file adapter_config.json"),
        ("{folder}/a", {"load_inplace": True}, "load_inplace"),
        ("{folder}/a", {"is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
async def test_what_clients_may_not_load(graph: Graph, path: str, more: dict[str, Any], why: str):
    write(graph.folder / "a")
    (graph.folder / "link").symlink_to("/")
    adapters, models = await graph.frontend()
    with pytest.raises(VLLMValidationError, match=why):
        await adapters.load(asked("a", path.format(folder=graph.folder), **more))
    assert not models.lora_requests and not await graph.store.get_prefix("t/")


@pytest.mark.parametrize("error", [VLLMValidationError("rank"), StoreUnavailable("away")])
async def test_a_load_that_fails_leaves_nothing(
    graph: Graph, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    adapters, models = await graph.frontend()
    path = write(graph.folder / "a")

    async def away(*_: Any, **__: Any) -> bool:
        raise error

    if isinstance(error, StoreUnavailable):
        monkeypatch.setattr(graph.store, "create", away)
    else:
        graph.client.error = error
    with pytest.raises(VLLMError, match=r"rank|away"):
        await adapters.load(asked("a", path))
    assert not models.lora_requests and not await graph.store.get_prefix("t/")


async def test_a_record_whose_reply_was_lost_is_served(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
):
    adapters, models = await graph.frontend()
    create = graph.store.create

    async def answers_nothing(key: str, value: bytes) -> bool:
        await create(key, value)
        raise StoreUnavailable("timeout")

    monkeypatch.setattr(graph.store, "create", answers_nothing)
    with pytest.raises(VLLMError, match="timeout"):
        await adapters.load(asked("a", write(graph.folder / "a")))
    await eventually(lambda: "a" in models.lora_requests)


async def test_two_frontends_that_load_the_same_adapter_both_serve_it(graph: Graph):
    path = write(graph.folder / "a")
    (one, first), (two, second) = await graph.frontend(), await graph.frontend()
    loads = [each.load(asked("a", path)) for each in (one, two)]
    answers = await asyncio.gather(*loads, return_exceptions=True)
    # The second one may know the record before it asks: then its own list refuses.
    texts = sorted(str(each) for each in answers)
    assert ["added successfully" in text for text in texts] == [True, False]
    assert "has already been loaded" in texts[1]
    await eventually(lambda: "a" in first.lora_requests and "a" in second.lora_requests)


async def test_what_another_frontend_did_last_counts(graph: Graph, monkeypatch: pytest.MonkeyPatch):
    """The first one's own change comes after it has heard of the other one's."""
    path = write(graph.folder / "a")
    (one, first), (two, second) = await graph.frontend(), await graph.frontend()
    create, delete = graph.store.create, graph.store.delete
    unloads = UnloadLoRAAdapterRequest(lora_name="a")

    async def unloaded_at_once(key: str, value: bytes) -> bool:
        created = await create(key, value)
        await eventually(lambda: "a" in first.lora_requests and "a" in second.lora_requests)
        await two.unload(unloads)
        await eventually(lambda: not first.lora_requests)
        return created

    async def loaded_again(key: str) -> bool:
        there = await delete(key)
        await eventually(lambda: not first.lora_requests and not second.lora_requests)
        await two.load(asked("a", path))
        await eventually(lambda: "a" in first.lora_requests)
        return there

    with monkeypatch.context() as patch:
        patch.setattr(graph.store, "create", unloaded_at_once)
        await one.load(asked("a", path))
    assert not first.lora_requests and not second.lora_requests
    await one.load(asked("a", path))
    with monkeypatch.context() as patch:
        patch.setattr(graph.store, "delete", loaded_again)
        await one.unload(unloads)
    assert "a" in first.lora_requests and "a" in second.lora_requests


async def test_a_record_neither_replaces_nor_removes_an_adapter_of_the_configuration(graph: Graph):
    adapters, models = await graph.frontend()
    await models.load_lora_adapter(asked("a", "/static/a"))
    key = names.adapter_key("t", "a")
    await graph.store.put(key, encode_json(Adapter(name="a", path=write(graph.folder / "a"))))
    mark = Adapter(name="b", path=write(graph.folder / "b"))
    await graph.store.put(names.adapter_key("t", "b"), encode_json(mark))
    await eventually(lambda: "b" in models.lora_requests)
    assert models.lora_requests["a"].lora_path == "/static/a"
    await adapters.unload(UnloadLoRAAdapterRequest(lora_name="a"))
    assert models.lora_requests["a"].lora_path == "/static/a"


def test_the_folder_is_an_absolute_path():
    with pytest.raises(ConfigError, match=r"Frontend.adapter-folder: adapters is no absolute path"):
        AdapterStore(MemoryStore(), "t", "adapters", uncounted)
