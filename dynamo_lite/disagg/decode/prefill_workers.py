"""The prefill workers as a decode engine sees them: registered, responsive, able to write here.

A prefill worker stores a `LinkRecord` of each link that it does not use, under its lease
(`disagg/prefill/peer_links.py`).
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.protocol import names
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Members, OnChange, Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.store import Store, WatchEvent, changes, following
from dynamo_lite.runtime.tasks import OnFailure, log_failure


class WriterLinks:
    """The marked links to one engine. Use `follow()` as a context. Without it none is known.

    Changed on the bridge's thread, read on any thread.
    """

    def __init__(self, namespace: str, engine_id: str):
        self._namespace, self._engine_id = namespace, engine_id
        #: Their keys in the store. What the records say is for people.
        self._marked: set[str] = set()

    def usable(self, members: Members) -> Members:
        """The members whose link is not marked."""
        return tuple(
            member
            for member in members
            if names.link_key(self._namespace, member.lease_id, self._engine_id) not in self._marked
        )

    def follow(
        self, store: Store, on_change: Callable[[], None], on_failure: OnFailure = log_failure
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Entering waits for the first listing. on_change: called from the event loop when a mark
        has come or gone, also in that listing. Raises StoreUnavailable."""
        prefix, take = names.links_prefix(self._namespace), partial(self._apply, on_change)
        return following(store, prefix, take, on_failure)

    def _apply(self, on_change: Callable[[], None], event: WatchEvent) -> None:
        before = frozenset(self._marked)
        for key, value in changes(event, before).items():
            if value is None:
                self._marked.discard(key)
            elif key.endswith(f":{self._engine_id}"):
                self._marked.add(key)
        if self._marked != before:
            on_change()


class PrefillWorkers:
    """Use `follow()` as a context. Changed on the bridge's thread; the members and their counts
    are read on any thread."""

    def __init__(self, config: EngineConfig, on_drop: OnDrop = uncounted):
        assert isinstance(config.role, DecodeEngineConfig)
        self._namespace, self._component = config.namespace, config.role.prefill_component
        self._on_drop = on_drop
        # Both are there inside `follow()`.
        self.roster: Roster
        self.health: HealthMonitor
        self._links = WriterLinks(config.namespace, config.engine_id)
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
            self.usable = self._links.usable(self.responsive)
            on_change(left, unwell)

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
            on_links = partial(changed, none, none)
            await enter(self._links.follow(store, on_links, on_failure))
            on_links()
            yield

    @property
    def unusable(self) -> int:
        """How many workers respond, but have a failed link to this engine."""
        return len(self.responsive) - len(self.usable)

    @property
    def unresponsive(self) -> int:
        """How many workers are registered, but do not respond."""
        return len(self.roster.members) - len(self.responsive)
