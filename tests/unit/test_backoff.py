from hypothesis import given
from hypothesis import strategies as st

from dynamo_lite.runtime.backoff import Backoff

BACKOFF = Backoff(first_s=0.5, factor=2.0, longest_s=8.0, calm_s=60.0)


def test_doubles_up_to_the_longest_wait():
    failures, delays = 0, []
    for _ in range(7):
        failures, delay_s = BACKOFF.after_exit(failures, uptime_s=1.0)
        delays.append(delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_calm_run_starts_the_count_again():
    assert BACKOFF.after_exit(9, uptime_s=60.0) == (1, 0.5)


@given(st.integers(min_value=0, max_value=10**9), st.floats(min_value=0, max_value=1e9))
def test_delay_stays_within_its_bounds(failures: int, uptime_s: float):
    count, delay_s = BACKOFF.after_exit(failures, uptime_s)
    assert BACKOFF.first_s <= delay_s <= BACKOFF.longest_s
    assert count >= 1
