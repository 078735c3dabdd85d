"""The thresholds of a decode engine: its config file, overridden by live options."""

from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.options import DisaggOptions


class LiveThresholds:
    """file: the values of the configuration file."""

    def __init__(self, file: DisaggOptions):
        self._file = file
        #: Replaced as a whole by the bridge's thread. A decision reads it once.
        self.now = file

    def change(self, values: Values) -> None:
        self.now = applied(values, self._file)
