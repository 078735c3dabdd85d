"""The prefill workers as a decode engine sees them: registered, responsive, able to write here.

A prefill worker stores a `LinkRecord` of each link that it does not use, under its lease
(`disagg/prefill/peer_links.py`).
"""

import contextlib
from collections.abc import AsyncIterator

from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Members, OnChange, Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.store import Store, WatchEvent, changes, following
from dynamo_lite.runtime.tasks import OnFailure, log_failure


class PrefillWorkers:
    """Use `follow()` as a context. Changed on the bridge's thread; `responsive` and `usable` are
    read on any thread."""

    def __init__(self, config: EngineConfig, on_drop: OnDrop = uncounted):
        assert isinstance(config.role, DecodeEngineConfig)
        self._namespace, self._component = config.namespace, config.role.prefill_component
        self._on_drop = on_drop
        # Both are there inside `follow()`.
        self.roster: Roster
        self.health: HealthMonitor
        self._engine_id = config.engine_id
        #: Keys of the links to this engine that are marked. What the records say is for people.
        self._marked: set[str] = set()
        #: The workers that respond, and those of them that have no failed link to this engine.
        self.responsive: Members = ()
        self.usable: Members = ()

    @contextlib.asynccontextmanager
    async def follow(
        self,
        store: Store,
        messaging: Messaging,
        on_change: OnChange,
        on_failure: OnFailure = log_failure,
    ) -> AsyncIterator[None]:
        """Waits for the first listings. Raises StoreUnavailable.

        on_change: takes the workers whose keys are gone, and those that do not respond any more;
        also called when others have come, or links were marked. on_failure: of what follows them.
        """
        none = frozenset[int]()

        def changed(left: frozenset[int], unwell: frozenset[int]) -> None:
            self.responsive = self.health.responsive
            self.usable = tuple(each for each in self.responsive if not self._is_marked(each))
            on_change(left, unwell)

        def on_links(event: WatchEvent) -> None:
            before = frozenset(self._marked)
            for key, value in changes(event, before).items():
                if value is None:
                    self._marked.discard(key)
                elif key.endswith(f":{self._engine_id}"):
                    self._marked.add(key)
            if self._marked != before:
                changed(none, none)

        prefix = names.endpoint_prefix(self._namespace, self._component, "prefill")
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            self.roster = await enter(Roster(store, prefix, self._on_drop, on_failure))
            self.health = await enter(
                HealthMonitor(
                    messaging,
                    self.roster,
                    namespace=self._namespace,
                    component=self._component,
                    on_drop=self._on_drop,
                )
            )
            self.roster.on_change(lambda _joined, left: changed(left, none))
            self.health.on_change(lambda _back, unwell: changed(none, unwell))
            links = names.links_prefix(self._namespace)
            await enter(following(store, links, on_links, on_failure))
            changed(none, none)
            yield

    def _is_marked(self, member: EndpointRecord) -> bool:
        key = names.link_key(self._namespace, member.lease_id, self._engine_id)
        return key in self._marked
