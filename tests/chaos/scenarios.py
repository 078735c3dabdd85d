"""Every scenario, by the order in which `--scenario all` plays them."""

from tests.chaos.cancels import CANCELS
from tests.chaos.delays import DELAYS
from tests.chaos.outages import OUTAGES
from tests.chaos.zombie import ZOMBIE

SCENARIOS = (*DELAYS, *OUTAGES, CANCELS, ZOMBIE)
