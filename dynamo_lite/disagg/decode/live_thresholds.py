"""The thresholds of a decode engine: its config file, overridden by live options."""

from dataclasses import dataclass

from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.policy.decision.single_flight import SingleFlightThresholds
from dynamo_lite.protocol.live_options import LiveValues, VllmWorkerLiveOptions
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.sealed_records import RecordSeals
from dynamo_lite.runtime.store import Store
from dynamo_lite.runtime.tasks import OnFailure, log_failure


@dataclass(frozen=True)
class EffectiveThresholds:
    """The thresholds at one moment."""

    #: Version of the live options; 0 if only the config file applies.
    version: int
    options: DisaggOptions
    single_flight: SingleFlightThresholds


class LiveThresholds:
    """block_size: in tokens."""

    def __init__(self, role: DecodeEngineConfig, block_size: int):
        self._role, self._block_size = role, block_size
        #: Replaced as a whole by the bridge's thread. A decision reads it once.
        self.now = self._effective(VllmWorkerLiveOptions(), 0)

    def follow(
        self,
        store: Store,
        namespace: str,
        on_drop: OnDrop,
        seals: RecordSeals,
        on_failure: OnFailure = log_failure,
    ) -> LiveOptions[LiveValues]:
        """A context. While it lasts, `now` follows the live options in the store."""
        return LiveOptions(
            store,
            namespace,
            self._role.component,
            VllmWorkerLiveOptions(),
            on_change=self.change,
            on_drop=on_drop,
            seals=seals,
            on_failure=on_failure,
        )

    def change(self, values: LiveValues, version: int) -> None:
        self.now = self._effective(values, version)

    def _effective(self, values: LiveValues, version: int) -> EffectiveThresholds:
        options = values.applied_to(self._role.options)
        shared = options.single_flight_min_length
        if shared is None:  # a prefix worth a remote prefill is also worth waiting for one
            shared = options.max_local_prefill_length // self._block_size * self._block_size
        return EffectiveThresholds(version, options, SingleFlightThresholds(shared))
