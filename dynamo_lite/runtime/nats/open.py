"""Opens the messaging of a graph."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from dynamo_lite.runtime.authenticated import AuthenticatedMessaging
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.secret import GraphSecret


def open_messaging(
    url: str, secret_file: str | Path | None, on_drop: OnDrop = uncounted
) -> AbstractAsyncContextManager[Messaging]:
    """A context. secret_file: None if messages are not authenticated.

    Raises StartupError for a secret file that cannot be used.
    """
    messaging = NatsMessaging(url, on_drop=on_drop)
    if secret_file is None:
        return messaging
    return AuthenticatedMessaging(messaging, GraphSecret(Path(secret_file)), on_drop)
