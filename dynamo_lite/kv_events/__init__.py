"""Which worker holds which prefixes: told by the workers, followed by the routers."""

from dynamo_lite.kv_events.follower import KvFollower
from dynamo_lite.kv_events.publisher import Holdings, KvPublisher

__all__ = ["Holdings", "KvFollower", "KvPublisher"]
