"""Asks an engine itself: whether it is healthy, what it serves, and how busy it is."""

import msgspec

from dynamo_lite.forward.engines import KnownEngine, StockEngineLoad, parse_load
from dynamo_lite.forward.protocols.mooncake import engine_ids
from dynamo_lite.forward.upstream import LegFailed, Upstream
from dynamo_lite.runtime.address import host_port


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class StockEngineProbe:
    """within_s: timeout of each question but `answers`."""

    def __init__(self, upstream: Upstream, *, within_s: float):
        self._upstream, self._within_s = upstream, within_s

    async def check(self, engine: KnownEngine) -> None:
        """Returns if the engine is healthy. Its model names are read when it has become healthy.

        Raises LegFailed.
        """
        status, _ = await self._fetch(engine, f"{engine.base}/health")
        if status != 200:
            raise LegFailed(engine.name, "broken", f"/health answered {status}")
        if not engine.healthy:
            await self._read_models(engine)
        if engine.protocol.query_path and engine.prefills:
            # Read each time, because the ids change after every restart.
            await self._query(engine)

    async def answers(self, engine: KnownEngine, *, within_s: float) -> bool:
        """Whether its server answers at all, whatever it says. Nothing is computed for a list of
        models, while `/health` may wait for a computation (SGLang's runs a request)."""
        try:
            await self._upstream.fetch(engine, f"{engine.base}/v1/models", within_s=within_s)
        except LegFailed as exc:
            return exc.answered
        return True

    async def load(self, engine: KnownEngine) -> StockEngineLoad | None:
        """None if its metrics do not contain the load. Raises LegFailed."""
        _, page = await self._fetch(engine, f"{engine.base}/metrics")
        return parse_load(page.decode(errors="replace"))

    async def _fetch(self, engine: KnownEngine, url: str) -> tuple[int, bytes]:
        return await self._upstream.fetch(engine, url, within_s=self._within_s)

    async def _read_models(self, engine: KnownEngine) -> None:
        """If the engine requires a key, its record may name the model."""
        status, page = await self._fetch(engine, f"{engine.base}/v1/models")
        try:
            found = msgspec.json.decode(page, type=_Models) if status == 200 else _Models([])
        except msgspec.DecodeError:
            found = _Models([])
        named = (engine.model,) if engine.model else ()
        engine.models = tuple(model.id for model in found.data) or named

    async def _query(self, engine: KnownEngine) -> None:
        url = f"http://{host_port(*engine.transfer_address)}{engine.protocol.query_path}"
        status, page = await self._fetch(engine, url)
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            engine.engine_ids = engine_ids(page)
            engine.ids_read += 1
        except ValueError as exc:
            raise LegFailed(engine.name, "broken", f"{url}: {exc}") from exc
