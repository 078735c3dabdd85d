"""In-process twins of the store and of messaging, for tests and single-process use."""

from tests.simulation.servers.memory_lease import MemoryLease
from tests.simulation.servers.memory_messaging import MemoryMessaging
from tests.simulation.servers.memory_store import MemoryStore

__all__ = ["MemoryLease", "MemoryMessaging", "MemoryStore"]
