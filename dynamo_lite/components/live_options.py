"""A component's options as they are changed while it runs (`protocol/tuning.py`).

What is applied here is its limits. A decode engine's process follows the store by
itself: what it decides by is its own; here is only told which version holds there.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET
from prometheus_client import Gauge

from dynamo_lite.components.config import FrontendConfig, VllmWorkerConfig
from dynamo_lite.policy.admission import Limits
from dynamo_lite.protocol.tuning import FrontendTuning, VllmWorkerTuning
from dynamo_lite.runtime.host import Host
from dynamo_lite.runtime.live_options import LiveOptions


class ComponentOptions:
    """`following` is the context in which the options of this process are followed.

    config: what the file says. nothing: the component's options, all unset. apply: takes
    the limits whenever they may have changed. engine_version: as the engine said last;
    None where none decides anything.
    """

    def __init__(
        self,
        host: Host,
        config: FrontendConfig | VllmWorkerConfig,
        nothing: FrontendTuning | VllmWorkerTuning,
        apply: Callable[[Limits], None],
    ):
        self._config, self._apply = config, apply
        self._fields = msgspec.structs.fields(nothing)
        self._gauge = Gauge(
            "dynamo_lite_options_version",
            "Version of the live options that hold in this process; 0: those of its file",
            registry=host.registry,
        )
        self.engine_version: int | None = None
        self.following = LiveOptions(
            host.store,
            host.spec.namespace,
            host.spec.component,
            nothing,
            on_change=self._change,
            on_drop=host.drops,
        )

    def facts(self) -> dict[str, Any]:
        """version: held here; engine_version: by the engine. file: what the configuration
        file says, by its keys. refused: what is wrong with the record in the store."""
        return {
            "version": self.following.version,
            "engine_version": self.engine_version,
            "file": {f.encode_name: getattr(self._config, f.name) for f in self._fields},
            "refused": self.following.refused,
        }

    def _change(self, values: FrontendTuning | VllmWorkerTuning, version: int) -> None:
        config = self._config
        in_flight, tokens = values.max_in_flight_requests, values.max_queued_tokens
        self._apply(
            Limits(
                in_flight=config.max_in_flight_requests if in_flight is UNSET else in_flight,
                prompt_tokens=config.max_queued_tokens if tokens is UNSET else tokens,
            )
        )
        self._gauge.set(version)
