"""In-process twins of the store and of messaging, for tests and single-process use."""

from dynamo_lite.runtime.memory_lease import MemoryLease
from dynamo_lite.runtime.memory_messaging import MemoryMessaging
from dynamo_lite.runtime.memory_store import MemoryStore

__all__ = ["MemoryLease", "MemoryMessaging", "MemoryStore"]
