"""SVG drawings of clients: how well each is served, and who holds what."""

from collections.abc import Sequence
from html import escape

from raylt.studies.drawings import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, Detail, svg, thinned


def strips(each: Sequence[tuple[str, int, list[float]]], what: str, detail: Detail) -> str:
    """A point for every client, or for some evenly over their order, a line per arm, sorted from left to right by
    accuracy; a bar at the mean of all."""
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
        for client in thinned(len(values), detail.clients):
            text = f"{escape(name)}: {100 * values[client]:.2f} % (number {client + 1} from below)"
            parts.append(f'<circle class="seed c{colour % COLOURS}" cx="{x(values[client]):.1f}" cy="{y}" r="3">'
                         f"<title>{text}</title></circle>")
        mean = sum(values) / len(values)
        parts.append(f'<rect class="fill c{colour % COLOURS}" x="{x(mean) - 1.5:.1f}" y="{y - 8}" width="3" '
                     f'height="16"><title>{escape(name)}, mean: {100 * mean:.2f} %</title></rect>')
    return svg(parts, what, height)


def holdings(counts: Sequence[Sequence[int]], names: Sequence[str], what: str, detail: Detail) -> str:
    """Who holds what: a square per client and class, its area the number of samples.

    Of many clients some are drawn, evenly over their numbers, and of many classes neighbours are one column.
    """
    shown = thinned(len(counts), max(10, detail.squares // 10))
    columns = _columns(len(names), max(10, detail.squares // max(1, len(shown))))
    held = [[sum(counts[k][c] for c in column) for column in columns] for k in shown]
    step = min(22.0, (WIDTH - LEFT - RIGHT) / max(1, len(columns)))
    tall = min(22.0, max(4.0, 420 / max(1, len(shown))))
    height = round(TOP + tall * len(shown) + BOTTOM)
    largest = max((n for row in held for n in row), default=1) or 1
    parts = []
    for place, (k, row) in enumerate(zip(shown, held, strict=True)):
        middle = TOP + tall * (place + 0.5)
        if len(shown) <= 40 or place % 10 == 0:
            parts.append(f'<text class="tick" x="{LEFT - 5}" y="{middle + 3.5:.1f}" text-anchor="end">{k}</text>')
        for c, n in enumerate(row):
            if n:
                side = max(0.8, min(step, tall) * 0.92 * (n / largest) ** 0.5)
                x = LEFT + step * (c + 0.5)
                parts.append(f'<rect class="held" x="{x - side / 2:.1f}" y="{middle - side / 2:.1f}" '
                             f'width="{side:.1f}" height="{side:.1f}"><title>client {k}, '
                             f"{_named(columns[c], names)}: {n}</title></rect>")
    every = max(1, -(-len(columns) // 12))
    for c in range(0, len(columns), every):
        text = str(names[c]) if len(names) <= 12 and max(map(len, map(str, names))) <= 3 else str(columns[c][0])
        parts.append(f'<text class="tick" x="{LEFT + step * (c + 0.5):.1f}" y="{height - 10}" text-anchor="middle">'
                     f"{escape(text)}</text>")
    return svg(parts, what, height)


def _columns(classes: int, most: int) -> list[range]:
    """At most so many runs of neighbouring classes, each of as many but the last."""
    width = max(1, -(-classes // most))
    return [range(first, min(first + width, classes)) for first in range(0, classes, width)]


def _named(column: range, names: Sequence[str]) -> str:
    return (f"class {escape(str(names[column[0]]))}" if len(column) == 1 else
            f"classes {column[0]} to {column[-1]} together")
