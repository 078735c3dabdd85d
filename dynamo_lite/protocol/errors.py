"""Every error that dynamo_lite raises on purpose, in one shallow tree."""


class DynamoLiteError(Exception):
    """Base of every deliberate error."""


class ConfigError(DynamoLiteError):
    """The user's graph, YAML or flags are wrong (exit 2). `mistakes` has one complete sentence per
    mistake."""

    def __init__(self, mistakes: list[str]):
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class StartupError(DynamoLiteError):
    """Something outside is missing or conflicts (exit 1)."""


class ProtocolError(DynamoLiteError):
    """A message was malformed, oversized or of an unknown wire version."""


class DeadlineExceeded(DynamoLiteError):
    """`what` did not finish within `after_s` seconds."""

    def __init__(self, what: str, after_s: float):
        super().__init__(f"{what}: no answer within {after_s:g} s")
        self.after_s = after_s


class Unavailable(DynamoLiteError):
    """Nothing can take this now; retrying later may help."""


class NoWorkers(Unavailable):
    """No live member serves the endpoint."""


class Overloaded(Unavailable):
    """A limit on requests or queued tokens is reached; it is less full later."""


class WorkerLost(Unavailable):
    """An accepted request lost its worker, and no other worker could continue it."""


class NoResponders(Unavailable):
    """The subject has no subscriber: that member is gone."""


class BrokerUnavailable(Unavailable):
    """The NATS connection is down."""


class StoreUnavailable(Unavailable):
    """The etcd connection is down or did not answer in time."""


class Refused(DynamoLiteError):
    """A live peer refused. `elsewhere`: another member may accept.

    `busy`: the peer is at a limit, and may have room later.
    """

    def __init__(self, reason: str, *, elsewhere: bool, busy: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.elsewhere = elsewhere
        self.busy = busy


class QueueFull(DynamoLiteError):
    """The broker holds `max_jobs` jobs already; this one was not queued."""


class EngineDied(DynamoLiteError):
    """The engine's process ended by itself."""


class LeaseLost(DynamoLiteError):
    """This process's lease is gone: it must stop acting."""

    def __init__(self, lease_id: int, why: str):
        super().__init__(f"lease {lease_id:x} lost: {why}")


class TransferError(DynamoLiteError):
    """A KV transfer with `peer` (an engine, or ENGINE/RANK, one of its ranks) failed."""

    def __init__(self, peer: str, detail: str):
        super().__init__(f"KV transfer with engine {peer}: {detail}")
        self.peer = peer
        self.detail = detail


class IncompatiblePeer(TransferError):
    """The two engines' layouts, models or versions differ; `detail` names both."""
