"""A component's options as they change while it runs (`protocol/live_options.py`).

A decode engine's process follows the store by itself, for its decisions. It reports here which
version it uses.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import Gauge

from dynamo_lite.policy.routing.admission import Limits
from dynamo_lite.protocol.live_options import LiveValues
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.sealed_records import RecordSeals
from dynamo_lite.services.config import (
    FrontendConfig,
    PlannerConfig,
    RouterConfig,
    VllmWorkerConfig,
)


class ComponentOptions:
    """`following` is the context in which this process follows its live options.

    config: the options of the configuration file. nothing: the component's options, all unset.
    apply: called with the values on every change.
    """

    def __init__(
        self,
        host: Host,
        config: FrontendConfig | VllmWorkerConfig | RouterConfig | PlannerConfig,
        nothing: LiveValues,
        apply: Callable[[LiveValues], None],
    ):
        self._config, self._apply = config, apply
        self._fields = msgspec.structs.fields(nothing)
        self._gauge = Gauge(
            "dynamo_lite_options_version",
            "Version of the live options that this process uses; 0: the configuration file alone",
            registry=host.registry,
        )
        #: The engine's last report; None for components without an engine's decisions.
        self.engine_version: int | None = None
        self.following = LiveOptions(
            host.store,
            host.spec.namespace,
            host.spec.component,
            nothing,
            on_change=self._change,
            on_drop=host.drops,
            seals=RecordSeals(host.secret),
        )

    def facts(self) -> dict[str, Any]:
        """For /health.

        version: used by this process. newest: the highest one so far. engine_version: used by the
        engine. file: the values of the configuration file, by their keys. refused: what is wrong
        with the record in the store.
        """
        return {
            "version": self.following.version,
            "newest": self.following.newest,
            "engine_version": self.engine_version,
            "file": {f.encode_name: self._in_file(f.encode_name, f.name) for f in self._fields},
            "refused": self.following.refused,
        }

    def _in_file(self, option: str, field: str) -> Any:
        """option: name as in the file, with its section."""
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
