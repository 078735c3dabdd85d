"""Figures of several rounds, as text."""

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (lowest to highest); `-` without values. digits: after the decimal point."""
    if not values:
        return "-"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def quartiles(values: Sequence[float], digits: int) -> str:
    """Median (quartiles); `-` for less than two values. digits: after the decimal point."""
    if len(values) < 2:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def verdict(met: bool, target: float) -> str:
    """Stands behind a figure."""
    return f"   target {target:.4g}: {'met' if met else 'MISSED'}"
