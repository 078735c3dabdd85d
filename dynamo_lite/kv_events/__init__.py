"""KV routing events: workers publish the prefixes that they hold, routers follow them."""

from dynamo_lite.kv_events.follower import KvFollower
from dynamo_lite.kv_events.publisher import Holdings, KvPublisher

__all__ = ["Holdings", "KvFollower", "KvPublisher"]
