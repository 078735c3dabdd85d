"""A component's options as they change while it runs (`protocol/live_options.py`).

A decode engine's process follows the store by itself, for its decisions.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from dynamo_lite.protocol.live_options import LIVE_OPTIONS, Values
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.process.component import Host


class ComponentOptions(LiveOptions):
    """config: the options of the configuration file. on_change: takes new values."""

    def __init__(self, host: Host, config: object, on_change: Callable[[Values], None]):
        super().__init__(
            host.store,
            host.spec.namespace,
            host.spec.component,
            on_change=on_change,
            on_drop=host.drops,
        )
        keys = LIVE_OPTIONS[host.spec.component]
        self._file = {key: attrgetter(key.replace("-", "_"))(config) for key in keys}

    def facts(self) -> dict[str, Any]:
        """For /health, by their keys. file: the values of the configuration file. set: those that
        this process uses instead."""
        return {"file": self._file, "set": self.values}
