"""In-process twins of the store and of messaging, for tests and single-process use."""

from dynamo_lite.simulation.servers.memory_lease import MemoryLease
from dynamo_lite.simulation.servers.memory_messaging import MemoryMessaging
from dynamo_lite.simulation.servers.memory_store import MemoryStore

__all__ = ["MemoryLease", "MemoryMessaging", "MemoryStore"]
