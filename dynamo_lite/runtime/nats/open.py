"""Opens the messaging of a graph."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dynamo_lite.runtime.authenticated import AuthenticatedMessaging
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.secret import GraphSecret


@asynccontextmanager
async def open_messaging(
    url: str, secret_file: str | Path | None, on_drop: OnDrop = uncounted
) -> AsyncIterator[Messaging]:
    """secret_file: None if messages are not authenticated.

    Raises StartupError for a secret file that cannot be used.
    """
    secret = None if secret_file is None else GraphSecret(Path(secret_file))
    async with NatsMessaging(url, on_drop=on_drop) as messaging:
        yield messaging if secret is None else AuthenticatedMessaging(messaging, secret, on_drop)
