"""SVG drawings of a report: text that is sharp at every size, colours from the page, and a title under the mouse.

A panel is 320 by 210 units, about the width of a phone, so that its text can be read where the page is narrow; a wide
page sets several beside each other. Colours are the page's: `c0`, `c1`, ... are classes of the style sheet, and so are
`d1`, `d2`, ..., the dashes by which lines of a ninth arm and more differ from those of the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 320, 210
LEFT, RIGHT, TOP, BOTTOM = 38, 10, 8, 26
COLOURS = 8
DASHES = 4


def looks(place: int) -> str:
    """The classes by which an arm's line is known: eight colours, and again with other dashes."""
    dash = place // COLOURS % DASHES
    return f"c{place % COLOURS}" + (f" d{dash}" if dash else "")


@dataclass(frozen=True)
class Detail:
    """How much of a drawing is drawn: the more drawings a page has, the less, so that a mail takes it (2 MB).

    Attributes:
        touched: points of a curve that answer to the mouse.
        points: of a curve.
        clients: points of an arm's row of clients.
        squares: of who holds what.
    """

    touched: int
    points: int
    clients: int
    squares: int

    @classmethod
    def of(cls, cells: int, rows: int) -> "Detail":
        """Of a page with so many cells, and so many rows of an arm in a cell, each with four curves."""
        def share(whole: int, among: int, least: int, most: int) -> int:
            return min(most, max(least, whole // max(1, among)))

        return cls(share(4000, 4 * rows, 2, 24), share(14000, 4 * rows, 10, 80), share(2500, rows, 10, 1000),
                   share(2000, cells, 100, 2000))


@dataclass(frozen=True)
class Curve:
    """One arm over rounds: the mean over seeds, the lowest and the highest seed.

    Attributes:
        colour: place of the arm, which has the same colour everywhere.
        rounds, mean, low, high: of equal length; values in [0, 1].
        finish: the last value when it is of what a method does after the last round.
    """

    name: str
    colour: int
    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    finish: bool = False


@dataclass(frozen=True)
class Estimate:
    """One arm in one cell: the mean, its interval and every seed.

    Attributes:
        low, high: None without an interval.
    """

    name: str
    colour: int
    mean: float
    low: float | None
    high: float | None
    values: list[float]


def curves(each: Sequence[Curve], what: str, highest: float, detail: Detail) -> str:
    """Lines with bands from the lowest to the highest seed; a diamond where a method's last phase ended, or where
    nothing else was judged.

    Args:
        highest: value that the axis must reach, the same for drawings that are compared by eye.
    """
    last = max((c.rounds[-1] for c in each), default=1)
    top = _nice(highest)

    def x(round: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (round - 1) / max(1, last - 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    parts = _axes(what, [(y(v), f"{100 * v:g}") for v in _ticks(top)],
                  [(x(r), str(r)) for r in sorted({1, (1 + last) // 2, last})], "round")
    for c in each:
        keep = thinned(len(c.rounds), detail.points)
        there = [(x(c.rounds[i]), y(c.high[i])) for i in keep]
        back = [(x(c.rounds[i]), y(c.low[i])) for i in reversed(keep)]
        colour = f"c{c.colour % COLOURS}"
        if c.low != c.high:
            parts.append(f'<polygon class="band {colour}" points="{_points(there + back)}"/>')
        line = _points([(x(c.rounds[i]), y(c.mean[i])) for i in keep])
        parts.append(f'<polyline class="line {looks(c.colour)}" points="{line}"><title>{escape(c.name)}</title>'
                     "</polyline>")
        for i in thinned(len(c.rounds), detail.touched):
            text = f"{c.name}, round {c.rounds[i]}: {_range(c.mean[i], c.low[i], c.high[i])}"
            if i == len(c.rounds) - 1 and (c.finish or len(c.rounds) == 1):
                text = f"{c.name}, at the end: {_range(c.mean[i], c.low[i], c.high[i])}"
                parts.append(_diamond(x(c.rounds[i]), y(c.mean[i]), colour, text))
            else:
                parts.append(f'<circle class="touch {colour}" cx="{x(c.rounds[i]):.1f}" cy="{y(c.mean[i]):.1f}" r="4">'
                             f"<title>{escape(text)}</title></circle>")
    return svg(parts, what)


def estimates(each: Sequence[Estimate], what: str, show_unit: str = "%", scale: float = 100) -> str:
    """A line per arm: its interval, a bar at its mean, and a point for every seed."""
    height = TOP + BOTTOM + 36 * len(each)
    lows = [v for e in each for v in [*e.values, e.mean if e.low is None else e.low]]
    highs = [v for e in each for v in [*e.values, e.mean if e.high is None else e.high]]
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    space = 0.06 * (high - low) or 0.01
    low, high = low - space, high + space

    def x(value: float) -> float:
        return 12 + (WIDTH - 24) * (value - low) / (high - low)

    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="12" x2="{WIDTH - 12}" y1="{bottom}" y2="{bottom}"/>']
    for value in _even(low * scale, high * scale):
        parts.append(f'<line class="grid" x1="{x(value / scale):.1f}" x2="{x(value / scale):.1f}" y1="{TOP}" '
                     f'y2="{bottom}"/><text class="tick" x="{x(value / scale):.1f}" y="{height - 10}" '
                     f'text-anchor="middle">{value:g}</text>')
    for place, e in enumerate(each):
        y, colour = TOP + 36 * place + 24, f"c{e.colour % COLOURS}"
        parts.append(f'<text class="name" x="12" y="{y - 10}">{escape(e.name)}</text>')
        text = f"{e.name}: {scale * e.mean:.2f} {show_unit}"
        if e.low is not None and e.high is not None:
            text += f", interval {scale * e.low:.2f} to {scale * e.high:.2f}"
            parts.append(f'<line class="line {colour}" x1="{x(e.low):.1f}" x2="{x(e.high):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<rect class="fill {colour}" x="{x(e.mean) - 2:.1f}" y="{y - 7}" width="4" height="14">'
                     f"<title>{escape(text)}</title></rect>")
        for value in e.values:
            parts.append(f'<circle class="seed {colour}" cx="{x(value):.1f}" cy="{y}" r="3">'
                         f"<title>{escape(e.name)}, a seed: {scale * value:.2f} {show_unit}</title></circle>")
    return svg(parts, what, height)


def bars(groups: Sequence[str], each: Sequence[tuple[str, int, list[float | None], list[list[float]]]],
         what: str) -> str:
    """Bars of arms beside each other in each group, with a point for every seed.

    Args:
        each: name, colour, mean by group and values of the seeds by group.
    """
    top = _nice(max((value for _, _, _, seeds in each for values in seeds for value in values), default=1.0))

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    span = (WIDTH - LEFT - RIGHT) / len(groups)
    wide = 0.8 * span / max(1, len(each))
    parts = _axes(what, [(y(v), f"{100 * v:g}") for v in _ticks(top)],
                  [(LEFT + span * (g + 0.5), name) for g, name in enumerate(groups)], "")
    for g, group in enumerate(groups):
        for place, (name, colour, means, seeds) in enumerate(each):
            mean = means[g]
            if mean is None:
                continue
            x = LEFT + span * (g + 0.1) + wide * place
            parts.append(f'<rect class="fill c{colour % COLOURS}" x="{x + 0.5:.1f}" y="{y(mean):.1f}" '
                         f'width="{max(1.0, wide - 1):.1f}" height="{y(0) - y(mean):.1f}">'
                         f"<title>{escape(name)}, {group}: {100 * mean:.2f} %</title></rect>")
            parts += [f'<circle class="dot" cx="{x + wide / 2:.1f}" cy="{y(v):.1f}" r="1.5"/>' for v in seeds[g]]
    return svg(parts, what)


def svg(parts: Sequence[str], what: str, height: int = HEIGHT) -> str:
    """A drawing of its parts; `what` is what a screen reader says of it."""
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(what, quote=True)}">'
            f"{''.join(parts)}</svg>")


def _axes(what: str, ys: Sequence[tuple[float, str]], xs: Sequence[tuple[float, str]], label: str) -> list[str]:
    parts = []
    for y, text in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    for place, (x, text) in enumerate(xs):
        anchor = "end" if label and place == len(xs) - 1 else "middle"
        words = f"{label} {text}" if label and place == len(xs) - 1 else text
        parts.append(f'<text class="tick" x="{min(x, WIDTH - 4):.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">'
                     f"{escape(words)}</text>")
    return parts


def _diamond(x: float, y: float, colour: str, text: str) -> str:
    corners = _points([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)])
    return f'<polygon class="fill {colour}" points="{corners}"><title>{escape(text)}</title></polygon>'


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _range(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.2f} %" + (f" ({100 * low:.2f} to {100 * high:.2f})" if low != high else "")


def thinned(count: int, most: int) -> list[int]:
    """At most so many places, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _nice(value: float) -> float:
    return next((top for top in (0.1, 0.2, 0.4, 0.6, 0.8) if value <= top), 1.0)


def _ticks(top: float) -> list[float]:
    return [round(top * i / 4, 4) for i in range(5)]


def _even(low: float, high: float) -> list[float]:
    """Three to six round numbers between two others."""
    span = high - low
    for step in (b * 10.0**e for e in range(-4, 7) for b in (1, 2, 5)):
        if span / step <= 6:
            first = -(-low // step)
            return [round((first + i) * step, 6) for i in range(int((high // step) - first) + 1)]
    return [low, high]
