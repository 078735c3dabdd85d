"""The curves of some runs as an SVG: load, workers, queue, attainment over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 110, 70, 60, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


@dataclass(frozen=True)
class _Curve:
    colour: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False


def picture(runs: Sequence[dict[str, Any]], title: str) -> str:
    """The runs are values of `report.summary`."""
    panels: list[tuple[str, list[_Curve]]] = [
        ("requests/s", []),
        ("workers (dashed: prefill)", []),
        ("jobs", []),
        ("attained", []),
    ]
    for number, run in enumerate(runs):
        colour, one = _COLOURS[number % len(_COLOURS)], run["series"]
        if number == 0:
            curve = _Curve("#444444", one["arrivals_s"], one["requests_per_s"])
            panels[0][1].append(curve)
        panels[1][1].append(_Curve(colour, one["at_s"], one["decode"]))
        panels[1][1].append(_Curve(colour, one["at_s"], one["prefill"], dashed=True))
        panels[2][1].append(_Curve(colour, one["at_s"], one["jobs"]))
        panels[3][1].append(_Curve(colour, one["arrivals_s"], one["attainment"]))
    last = max((x for _, curves in panels for one in curves for x in one.xs), default=1.0) or 1.0
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="14">{escape(title)}</text>',
    ]
    at = _LEFT
    for number, run in enumerate(runs):
        name, colour = escape(run["name"][:40]), _COLOURS[number % len(_COLOURS)]
        parts.append(f'<text x="{at}" y="34" fill="{colour}">{name}</text>')
        at += 12 + 7 * len(name)
    for number, (label, curves) in enumerate(panels):
        top = _TOP + number * (_HEIGHT + _GAP)
        parts += _panel(label, curves, top, last)
    return "\n".join([*parts, "</svg>\n"])


def _panel(label: str, curves: Sequence[_Curve], top: float, last: float) -> list[str]:
    highest = max((y for one in curves for y in one.ys if y is not None), default=0.0) or 1.0
    bottom = top + _HEIGHT
    parts = [
        f'<text x="{_LEFT}" y="{top - 4}" fill="#444444">{escape(label)}</text>',
        f'<path d="M{_LEFT} {top}V{bottom}H{_LEFT + _WIDTH}" stroke="#999999" fill="none"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{highest:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for part in range(5):
        x = _LEFT + _WIDTH * part / 4
        text = f"{last * part / 4:.4g} s"
        parts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{text}</text>')
    for one in curves:
        dash = ' stroke-dasharray="5 3"' if one.dashed else ""
        path = _path(one, top, last, highest)
        parts.append(f'<path d="{path}" stroke="{one.colour}" fill="none"{dash}/>')
    return parts


def _path(one: _Curve, top: float, last: float, highest: float) -> str:
    path, pen = [], "M"
    for x, y in zip(one.xs, one.ys, strict=True):
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{_LEFT + _WIDTH * x / last:.1f} {top + _HEIGHT * (1 - y / highest):.1f}")
        pen = "L"
    return "".join(path)
