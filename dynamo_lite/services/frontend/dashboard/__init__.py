"""The Frontend's page `/dashboard`: the running graph, live."""

from dynamo_lite.services.frontend.dashboard.app import Dashboard, is_loopback
from dynamo_lite.services.frontend.dashboard.viewers import Viewers

__all__ = ["Dashboard", "Viewers", "is_loopback"]
