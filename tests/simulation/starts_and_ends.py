"""Workers that start and end badly, as real ones may."""

import asyncio
from typing import Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.component import Component, Host


class NeverReady:
    """Component. Its start fails after a time."""

    def __init__(self, after_s: float):
        self._after_s = after_s

    async def start(self, host: Host) -> Any:
        await asyncio.sleep(self._after_s)
        raise StartupError("no memory is free on its device")

    async def drain(self, grace_s: float) -> None:
        """It is never ready."""

    async def close(self) -> None:
        """Nothing to close."""

    def health(self) -> Any:
        return {"ok": False}


class SlowEnd:
    """A component that stays for a while after its drain, like one with an engine that ends
    slowly."""

    def __init__(self, inner: Component, after_s: float):
        self._inner, self._after_s = inner, after_s

    async def start(self, host: Host) -> Any:
        return await self._inner.start(host)

    async def drain(self, grace_s: float) -> None:
        await self._inner.drain(grace_s)

    async def close(self) -> None:
        await asyncio.sleep(self._after_s)
        await self._inner.close()

    def health(self) -> Any:
        return self._inner.health()
