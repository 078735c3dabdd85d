"""Options of a component that can be changed while it runs (`protocol/live_options.py`).

Owns the values that are in effect in this process: those of the last valid record in the
store. A record that is invalid is refused as a whole, and the values before stay in effect.
"""

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.live_options import LIVE_OPTIONS, Values, decode_live_options
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.store import Store, WatchEvent, changes, following
from dynamo_lite.runtime.tasks import OnFailure, log_failure

logger = logging.getLogger(__name__)


class LiveOptions:
    """config: the component's options of the configuration file, for `facts`. on_change: takes new
    values, in the event loop."""

    def __init__(
        self,
        store: Store,
        namespace: str,
        component: str,
        *,
        config: object = None,
        on_change: Callable[[Values], None],
        on_drop: OnDrop = uncounted,
    ):
        self._store, self._component = store, component
        self._key = names.live_options_key(namespace, component)
        self._on_change, self._on_drop = on_change, on_drop
        self._log_limit = LogLimit()
        keys = () if config is None else LIVE_OPTIONS[component]
        self._file = {key: attrgetter(key.replace("-", "_"))(config) for key in keys}
        #: Those of the last valid record.
        self.values: Values = {}

    def facts(self) -> dict[str, Any]:
        """For /health, by their keys. file: the values of the configuration file. set: those that
        this process uses instead."""
        return {"file": self._file, "set": self.values}

    @contextlib.asynccontextmanager
    async def following(self, on_failure: OnFailure = log_failure) -> AsyncIterator[None]:
        """Entering waits for the first listing of the store. Raises StoreUnavailable."""
        async with following(self._store, self._key, self._take, on_failure):
            if not self.values:  # otherwise `_take` has logged them
                self._log()
            yield

    def _take(self, event: WatchEvent) -> None:
        found = changes(event, (self._key,))
        if self._key not in found:
            return  # a component whose name begins with this one's
        values: Values = {}
        if (data := found[self._key]) is not None:
            try:
                values = decode_live_options(data, self._component)
            except ProtocolError as exc:
                self._on_drop("config")
                text = "%s: options refused, nothing changes: %s"
                self._log_limit.log(logger, text, self._key, exc)
                return
        before, self.values = self.values, values
        if values != before:
            self._on_change(values)
            self._log()

    def _log(self) -> None:
        # Tests and benchmarks read this line: it says when an engine follows, too.
        logger.info("%s: in effect: %s", self._key, json.dumps(self.values))
