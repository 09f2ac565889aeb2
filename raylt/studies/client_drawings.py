"""SVG drawings of clients: how well each is served, and who holds what."""

from collections.abc import Sequence
from html import escape

from raylt.studies.drawings import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, svg


def strips(each: Sequence[tuple[str, int, list[float]]], what: str) -> str:
    """A point for every client, a line per arm, sorted from left to right by accuracy; a bar at the mean."""
    height = TOP + BOTTOM + 36 * len(each)

    def x(value: float) -> float:
        return 12 + (WIDTH - 24) * value

    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="12" x2="{WIDTH - 12}" y1="{bottom}" y2="{bottom}"/>']
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{bottom}"/>'
                     f'<text class="tick" x="{x(value):.1f}" y="{height - 10}" text-anchor="middle">{100 * value:g}'
                     "</text>")
    for place, (name, colour, values) in enumerate(each):
        y = TOP + 36 * place + 24
        parts.append(f'<text class="name" x="12" y="{y - 10}">{escape(name)}</text>')
        for client, value in enumerate(values):
            parts.append(f'<circle class="seed c{colour % COLOURS}" cx="{x(value):.1f}" cy="{y}" r="3"><title>'
                         f"{escape(name)}: {100 * value:.2f} % (number {client + 1} from below)</title></circle>")
        mean = sum(values) / len(values)
        parts.append(f'<rect class="fill c{colour % COLOURS}" x="{x(mean) - 1.5:.1f}" y="{y - 8}" width="3" '
                     f'height="16"><title>{escape(name)}, mean: {100 * mean:.2f} %</title></rect>')
    return svg(parts, what, height)


def holdings(counts: Sequence[Sequence[int]], names: Sequence[str], what: str) -> str:
    """Who holds what: a square per client and class, its area the number of samples."""
    clients, classes = len(counts), len(names)
    step = min(22.0, (WIDTH - LEFT - RIGHT) / max(1, classes))
    tall = min(22.0, max(4.0, 420 / max(1, clients)))
    height = round(TOP + tall * clients + BOTTOM)
    largest = max((n for row in counts for n in row), default=1) or 1
    parts = []
    for k, row in enumerate(counts):
        middle = TOP + tall * (k + 0.5)
        if clients <= 40 or k % 10 == 0:
            parts.append(f'<text class="tick" x="{LEFT - 5}" y="{middle + 3.5:.1f}" text-anchor="end">{k}</text>')
        for c, n in enumerate(row):
            if n:
                side = max(0.8, min(step, tall) * 0.92 * (n / largest) ** 0.5)
                x = LEFT + step * (c + 0.5)
                parts.append(f'<rect class="held" x="{x - side / 2:.1f}" y="{middle - side / 2:.1f}" '
                             f'width="{side:.1f}" height="{side:.1f}"><title>client {k}, class '
                             f"{escape(str(names[c]))}: {n}</title></rect>")
    every = max(1, -(-classes // 12))
    for c in range(0, classes, every):
        text = str(names[c]) if classes <= 12 and max(map(len, map(str, names))) <= 3 else str(c)
        parts.append(f'<text class="tick" x="{LEFT + step * (c + 0.5):.1f}" y="{height - 10}" text-anchor="middle">'
                     f"{escape(text)}</text>")
    return svg(parts, what, height)
