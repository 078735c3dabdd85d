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
    """Use `follow()` as a context; before it nothing may be asked.

    Changed on the bridge's thread; the counts are read on any thread.
    """

    def __init__(self, config: EngineConfig, on_drop: OnDrop = uncounted):
        assert isinstance(config.role, DecodeEngineConfig)
        self._namespace, self._component = config.namespace, config.role.prefill_component
        self._on_drop = on_drop
        # Both are there inside `follow()`.
        self._roster: Roster
        self._health: HealthMonitor
        self._links = WriterLinks(config.namespace, config.engine_id)

    @contextlib.asynccontextmanager
    async def follow(
        self,
        store: Store,
        messaging: Messaging,
        on_members: OnChange,
        on_health: OnChange,
        on_links: Callable[[], None],
        on_failure: OnFailure = log_failure,
    ) -> AsyncIterator[None]:
        """Waits for the first listings. Raises StoreUnavailable.

        on_members: takes the workers that have registered and those that have left. on_health:
        takes those that respond again and those that do not any more. on_links: called when a link
        is marked, or not any more. on_failure: of what follows them.
        """
        prefix = names.endpoint_prefix(self._namespace, self._component, "prefill")
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            self._roster = await enter(Roster(store, prefix, self._on_drop, on_failure))
            self._health = await enter(
                HealthMonitor(
                    messaging,
                    self._roster,
                    namespace=self._namespace,
                    component=self._component,
                    on_drop=self._on_drop,
                )
            )
            self._roster.on_change(on_members)
            self._health.on_change(on_health)
            await enter(self._links.follow(store, on_links, on_failure))
            yield

    def show_life(self, lease_id: int) -> None:
        """The worker has sent a message, so it responds."""
        self._health.shows_life(lease_id)

    def trouble(self, lease_id: int) -> str:
        """Why the worker must not get a claim; empty if it may. Of one that is not registered
        nothing would report that it is gone."""
        why = self._health.trouble(lease_id)
        return f"not able to work: {why}" if why else ""

    @property
    def responsive(self) -> Members:
        return self._health.responsive

    @property
    def usable(self) -> Members:
        """The workers that respond and have no failed link to this engine."""
        return self._links.usable(self.responsive)

    @property
    def unusable(self) -> int:
        """How many workers respond, but have a failed link to this engine."""
        responsive = self.responsive
        return len(responsive) - len(self._links.usable(responsive))

    @property
    def unresponsive(self) -> int:
        """How many workers are registered, but do not respond."""
        return len(self._roster.members) - len(self.responsive)
