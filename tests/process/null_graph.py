"""A graph with the shipped Frontend and decode worker, and engines that compute nothing.

It needs nothing of the tests but `NullEngine`, so a test may copy both beside an installed
dynamo-lite (`copy_to`).
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynamo_lite.disagg.engine import DecodeEngine
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.decode_worker import VllmWorker
from dynamo_lite.serve.services.services import FRONTEND, Graph, Service
from dynamo_lite.serve.services.vllm_backend import VllmBackend
from tests.null_engine import NullEngine

#: Tokens that are letters in the tiny model's vocabulary: `b` to `u`, by position.
FIRST_TOKEN, LETTERS = 70, "bcdefghijklmnopqrstu"


def told(prompt: list[int], position: int) -> int:
    """The token at a position of the answer to a prompt: a letter of the tiny model."""
    return FIRST_TOKEN + (prompt[0] + position) % len(LETTERS)


def is_answer(text: str, tokens: int) -> bool:
    """Whether it is the text of an answer of this length, to any prompt."""
    first = LETTERS.index(text[0])
    return text == "".join(LETTERS[(first + position) % len(LETTERS)] for position in range(tokens))


def copy_to(folder: Path) -> None:
    own = Path(__file__)
    shutil.copy(own, folder)
    (folder / "tests").mkdir()
    shutil.copy(own.parents[1] / "null_engine.py", folder / "tests")


@dataclass(frozen=True, kw_only=True)
class NullWorkerConfig(VllmWorkerConfig):
    #: Time between two steps of the engine.
    step_s: float = 0.01


class PacedEngine(NullEngine):
    def __init__(self, step_s: float):
        super().__init__(token_at=told)
        self._step_s = step_s

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        async for deltas in super().steps():
            yield deltas
            await asyncio.sleep(self._step_s)


class NullBackend(VllmBackend):
    def __init__(self, step_s: float):
        self._step_s = step_s

    async def prepare(self) -> None: ...

    def open_decode_engine(
        self, host: Host, config: VllmWorkerConfig
    ) -> AbstractAsyncContextManager[DecodeEngine]:
        return PacedEngine(self._step_s)


class NullWorker(VllmWorker):
    """Component. config: the fields of `NullWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any]):
        own = {key: value for key, value in config.items() if key != "step_s"}
        super().__init__(own, NullBackend(config["step_s"]))


_WORKER = Service(
    name="VllmWorker", config=NullWorkerConfig, component=f"{__name__}:NullWorker"
).with_defaults(remote_prefill=False)

#: Workers alone, for clients that are in the Frontend's place.
Worker = Graph(services=(_WORKER,))
#: With the configuration file of any graph with these services.
Frontend = FRONTEND.link(replace(_WORKER, flags="engine"))
