"""The thresholds of a decode engine: those of its configuration, and the live options on them."""

from dataclasses import dataclass

from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.policy.single_flight import SingleFlightThresholds
from dynamo_lite.protocol.live_options import LiveValues, VllmWorkerLiveOptions
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.store import Store


@dataclass(frozen=True)
class EffectiveThresholds:
    """What is in effect at one moment."""

    #: Of the live options that are in it; 0: none are.
    version: int
    options: DisaggOptions
    single_flight: SingleFlightThresholds


class LiveThresholds:
    """`now` is replaced as a whole by the bridge's thread. A decision reads it once."""

    def __init__(self, role: DecodeEngineConfig, block_size: int):
        self._role, self._block_size = role, block_size
        self.now = self._effective(VllmWorkerLiveOptions(), 0)

    def follow(self, store: Store, namespace: str, on_drop: OnDrop) -> LiveOptions[LiveValues]:
        """A context: while it lasts, `now` follows the live options in the store."""
        return LiveOptions(
            store,
            namespace,
            self._role.component,
            VllmWorkerLiveOptions(),
            on_change=self.change,
            on_drop=on_drop,
        )

    def change(self, values: LiveValues, version: int) -> None:
        self.now = self._effective(values, version)

    def _effective(self, values: LiveValues, version: int) -> EffectiveThresholds:
        options = values.applied_to(self._role.options)
        shared = options.single_flight_min_length
        if shared is None:  # what is worth a remote prefill is worth a wait for one
            shared = options.max_local_prefill_length // self._block_size * self._block_size
        return EffectiveThresholds(version, options, SingleFlightThresholds(shared))
