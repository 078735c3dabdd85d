"""The LoRA adapters of one engine (https://docs.vllm.ai/en/latest/features/lora.html).

Requests and jobs name an adapter by name and path. Each engine has numbers of its own for them,
and loads an adapter before the first request with it: a load that failed in a step would end the
engine's process.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import ADAPTER_LOAD_S, Adapter
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.vllm.engine.weights import digest

#: Files of an adapter that vLLM loads: its configuration, and the first kind of weights.
_CONFIG, _WEIGHTS = "adapter_config.json", ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True)
class _Loaded:
    #: With the digest of the files.
    adapter: Adapter
    request: LoRARequest
    #: Size and time of each file.
    files: list[tuple[str, int, int]]


class Adapters:
    """add: loads an adapter into the engine, and raises what the engine says against it."""

    def __init__(self, add: Callable[[LoRARequest], Awaitable[object]]):
        self._add, self._tasks = add, OwnedTasks()
        #: Each try has a number of its own: one that was late may have loaded its adapter.
        self._numbers = itertools.count(1)
        #: By the adapter's key.
        self._loads: dict[str, asyncio.Task[_Loaded | Refused]] = {}

    async def load(self, adapter: Adapter) -> tuple[Adapter, LoRARequest]:
        """Returns the adapter with its digest, and vLLM's name of it.

        Raises Refused if the engine cannot load it, if its files have changed since it was loaded,
        or if they differ from the given digest.
        """
        task = self._loads.get(adapter.key)
        if task is None or (task.done() and isinstance(task.result(), Refused)):
            name = f"load the LoRA adapter {adapter.name}"
            task = self._tasks.start(self._try(adapter), name=name)
            self._loads[adapter.key] = task
        loaded = await asyncio.shield(task)
        if isinstance(loaded, Refused):
            raise loaded
        # vLLM loads an adapter again that it has put aside, in a step.
        try:
            files = await asyncio.to_thread(_look, loaded.request.lora_path)
        except OSError as exc:
            raise _refused(adapter, str(exc)) from exc
        if files != loaded.files:
            raise _refused(adapter, "its files have changed: load them from another path")
        if adapter.digest not in ("", loaded.adapter.digest):
            raise _refused(adapter, "its files differ from those of the decode worker")
        return loaded.adapter, loaded.request

    async def close(self) -> None:
        await self._tasks.end()

    async def _try(self, adapter: Adapter) -> _Loaded | Refused:
        number = next(self._numbers)
        try:
            async with asyncio.timeout(ADAPTER_LOAD_S):
                # Asked once: the hub may have other files of that name later.
                path = await asyncio.to_thread(get_adapter_absolute_path, adapter.path)
                request = LoRARequest(adapter.key, number, path)
                files = await asyncio.to_thread(_look, path)
                made = await asyncio.to_thread(lambda: digest(_files(path)))
                await self._add(request)
        except EngineDeadError:
            return Refused("the engine's process has ended", elsewhere=True)
        except TimeoutError:
            return _refused(adapter, f"it was not loaded within {ADAPTER_LOAD_S:g} s")
        except OSError as exc:
            return _refused(adapter, str(exc))
        except Exception as exc:  # vLLM's client raises no narrower one
            why = str(exc).removeprefix("Call to add_lora method failed: ")
            return _refused(adapter, why, elsewhere=False)
        return _Loaded(msgspec.structs.replace(adapter, digest=made), request, files)


def _files(path: str) -> list[Path]:
    folder = Path(path)
    weights = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    return [folder / _CONFIG, *weights]


def _look(path: str) -> list[tuple[str, int, int]]:
    """Size and time of each file that is there."""
    found = [(file.name, file.stat()) for file in _files(path) if file.exists()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _refused(adapter: Adapter, why: str, *, elsewhere: bool = True) -> Refused:
    text = f"this worker cannot use the LoRA adapter {adapter.name!r} at {adapter.path}: {why}"
    return Refused(text, elsewhere=elsewhere)
