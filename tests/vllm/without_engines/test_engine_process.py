"""The start of vLLM's process, when it dies meanwhile."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.engine import process
from dynamo_lite.vllm.engine.process import EngineContext, EngineProcess
from tests.twins.servers import MemoryMessaging


class DeadClient:
    """vLLM's: a call that was sent before the engine's death was noticed has no end."""

    ended = False

    async def call_utility_async(self, _name: str) -> Any:
        await asyncio.Future()

    def shutdown(self) -> None:
        self.ended = True


async def test_an_engine_that_dies_at_the_end_of_its_start_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "_DESCRIBE_S", 0.05)
    context = EngineContext(
        [],
        engine_config=None,
        engine_config_path=tmp_path / "engine.json",
        messaging=MemoryMessaging(),
        registry=CollectorRegistry(),
    )
    client, engine = DeadClient(), EngineProcess(context, publishes_kv=True)
    monkeypatch.setattr(engine, "_load", lambda: client)
    monkeypatch.setattr(engine, "kv_events", SimpleNamespace(follow=None))
    async with asyncio.timeout(5):
        with pytest.raises(StartupError, match="the engine's process does not answer"):
            await engine.__aenter__()
    assert client.ended
