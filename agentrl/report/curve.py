"""Draws pass@k curves of several policies as one SVG picture, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 400, 56, 24, 48
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
"""Told apart by people who see red and green alike too, in the order in which they are used."""
Points = Sequence[Sequence[float]]
"""k, value, low and high of each point."""


def draw(curves: Sequence[tuple[str, Points]]) -> str:
    """Return the picture: k from left to right in octaves, pass@k upwards, a band for each interval.

    A trained policy above its base at every k has learnt tasks; one that is above it at k = 1 alone has only become
    surer of what it could do before.
    """
    most = max((point[0] for _, points in curves for point in points), default=1)
    octaves = max(1.0, math.log2(most))
    right = WIDTH - 16

    def x(k: float) -> float:
        return LEFT + (right - LEFT) * math.log2(k) / octaves

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate

    parts = [_axes(x, y, most, right)]
    for number, (name, points) in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        upper = [f"{x(k):.1f},{y(high):.1f}" for k, _, _, high in points]
        lower = [f"{x(k):.1f},{y(low):.1f}" for k, _, low, _ in reversed(points)]
        middle = [f"{x(k):.1f},{y(value):.1f}" for k, value, _, _ in points]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in middle]
        label = escape(_printable(name))
        at = TOP + 14 + 18 * number
        parts.append(f'<rect x="{LEFT + 10}" y="{at - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 28}" y="{at}">{label}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    head += 'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
    return head + "\n".join(parts) + "\n</svg>\n"


def _axes(x: object, y: object, most: float, right: int) -> str:
    assert callable(x) and callable(y)
    parts = []
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    k = 1
    while k <= most:
        parts.append(f'<text x="{x(k):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{k}</text>')
        k *= 2
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">tries per task, k</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">')
    parts.append("pass@k</text>")
    return "\n".join(parts)


def _printable(name: str) -> str:
    """Return a name without what XML forbids or what turns the direction of text, shortened in its middle."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= 70 else f"{name[:34]}…{name[-34:]}"
