"""A component's options as they are changed while it runs (`protocol/live_options.py`).

A decode engine's process follows the store by itself: what it decides by is its own;
here is only told which version holds there.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import Gauge

from dynamo_lite.policy.admission import Limits
from dynamo_lite.protocol.live_options import LiveValues
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.process.host import Host
from dynamo_lite.services.config import FrontendConfig, RouterConfig, VllmWorkerConfig


class ComponentOptions:
    """`following` is the context in which the options of this process are followed.

    config: what the file says. nothing: the component's options, all unset. apply: takes
    the values whenever they have changed. engine_version: as the engine said last;
    None where none decides anything.
    """

    def __init__(
        self,
        host: Host,
        config: FrontendConfig | VllmWorkerConfig | RouterConfig,
        nothing: LiveValues,
        apply: Callable[[LiveValues], None],
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
            "file": {f.encode_name: self._in_file(f.encode_name, f.name) for f in self._fields},
            "refused": self.following.refused,
        }

    def _in_file(self, option: str, field: str) -> Any:
        """option: as in the file, with the section that it is in."""
        section, dot, _ = option.rpartition(".")
        holder = getattr(self._config, section.replace("-", "_")) if dot else self._config
        return getattr(holder, field)

    def _change(self, values: LiveValues, version: int) -> None:
        self._apply(values)
        self._gauge.set(version)


def limits(config: AdmissionOptions, values: LiveValues) -> Limits:
    """The limits of the configuration file, with the live options applied."""
    options = values.applied_to(config)
    return Limits(in_flight=options.max_in_flight_requests, prompt_tokens=options.max_queued_tokens)
