"""The LoRA adapters of one engine (https://docs.vllm.ai/en/latest/features/lora.html).

Requests and jobs name an adapter by name and path. Each engine has numbers of its own for them,
and loads an adapter before the first request with it: a load that failed in a step would end the
engine's process.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.generate import Adapter
from dynamo_lite.vllm.engine.weights import digest

_LOAD_S = 120.0
#: Files of an adapter that vLLM loads: its configuration, and the first kind of weights.
_CONFIG, _WEIGHTS = "adapter_config.json", ("*.safetensors", "*.bin", "*.pt")


class Adapters:
    """add: loads an adapter into the engine, and raises what the engine says against it."""

    def __init__(self, add: Callable[[LoRARequest], Awaitable[object]]):
        self._add = add
        self._one_at_a_time = asyncio.Lock()
        #: Each try has a number of its own: one that was cancelled may have loaded its adapter.
        self._numbers = itertools.count(1)
        #: By name and path. Its digest is that of the files when they were loaded.
        self._loaded: dict[tuple[str, str], tuple[Adapter, LoRARequest]] = {}

    async def load(self, adapter: Adapter) -> tuple[Adapter, LoRARequest]:
        """Returns the adapter with its digest, and vLLM's name of it.

        Raises Refused if the engine cannot load it, or if its files differ from the given digest.
        """
        key = adapter.name, adapter.path
        if key not in self._loaded:
            async with self._one_at_a_time:
                if key not in self._loaded:
                    self._loaded[key] = await self._load(adapter)
        found, request = self._loaded[key]
        if adapter.digest not in ("", found.digest):
            raise _refused(adapter, "its files differ from those of the decode worker")
        return found, request

    async def _load(self, adapter: Adapter) -> tuple[Adapter, LoRARequest]:
        request = LoRARequest(adapter.name, next(self._numbers), adapter.path)
        try:
            async with asyncio.timeout(_LOAD_S):
                made = await asyncio.to_thread(_digest, adapter.path)
                await self._add(request)
        except EngineDeadError as exc:
            raise Refused("the engine's process has ended", elsewhere=True) from exc
        except TimeoutError as exc:
            raise _refused(adapter, f"it was not loaded within {_LOAD_S:g} s") from exc
        except OSError as exc:
            raise _refused(adapter, str(exc)) from exc
        except Exception as exc:  # vLLM's client raises no narrower one
            why = str(exc).removeprefix("Call to add_lora method failed: ")
            raise _refused(adapter, why, elsewhere=False) from exc
        return msgspec.structs.replace(adapter, digest=made), request


def _digest(path: str) -> str:
    """Raises OSError without its files, and what the hub raises for a name that it does not have"""
    folder = Path(get_adapter_absolute_path(path))
    files = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    return digest([folder / _CONFIG, *files])


def _refused(adapter: Adapter, why: str, *, elsewhere: bool = True) -> Refused:
    text = f"this worker cannot use the LoRA adapter {adapter.name!r} at {adapter.path}: {why}"
    return Refused(text, elsewhere=elsewhere)
