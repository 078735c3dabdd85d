"""The orders of a component to its switchable engine: become the engine of another role.

They come over NATS, beside the session of the scheduler half that is active, and are looked at in
the engine's next step. The component repeats an order until it is followed, so a refusal drops it.
"""

import contextlib
from collections.abc import AsyncIterator

from dynamo_lite.disagg.bridge import OpenSession
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.server_clients import ServerClients
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import ChangeRole, RoleReply, decode_change_role
from dynamo_lite.runtime.drops import OnDrop, counted

_MOST_CHARACTERS = 1024


class RoleOrders:
    """`session` is for the bridge's thread, everything else for the engine's."""

    def __init__(self) -> None:
        #: The order that was not looked at; one reference, which both threads replace.
        self._order: ChangeRole | None = None
        self._refused = ""

    @property
    def waiting(self) -> bool:
        """Whether the engine must make a step."""
        return self._order is not None

    def take(self) -> ChangeRole | None:
        """The order to be followed or refused now."""
        order, self._order = self._order, None
        return order

    def refuse(self, why: str) -> None:
        """The next order is answered with this."""
        self._refused = why[:_MOST_CHARACTERS]

    def followed(self) -> None:
        """The engine has its new role."""
        self._order, self._refused = None, ""

    def session(
        self, config: EngineConfig, clients: ServerClients, inner: OpenSession, on_drop: OnDrop
    ) -> OpenSession:
        """The session `inner` of the half with this config, which also takes orders."""

        @contextlib.asynccontextmanager
        async def both() -> AsyncIterator[None]:
            subject = names.role_subject(config.namespace, config.engine_id)
            on_order = counted(self._on_order, "change_role", on_drop)
            async with (
                inner(),
                clients.messaging() as messaging,
                messaging.serve(subject, on_order),
            ):
                yield

        return both

    async def _on_order(self, payload: bytes) -> bytes:
        self._order = decode_change_role(payload)
        return encode(RoleReply(refused=self._refused))
