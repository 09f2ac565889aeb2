"""SVG drawings of a report: learning curves, estimates, bars by group, clients' accuracies and class counts.

A panel is 320 by 210 units, about the width of a phone, so that its text is legible on a narrow page. Wide pages show
several panels in a row. Every mark has a tooltip. Colours come from the classes `c0`, `c1`, ... of the page's style
sheet. Its classes `d1`, `d2`, ... are dashes. Neighbouring arms differ in both, so that their lines can be told apart
without colours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from raylt.errors import shorten

WIDTH = 320
HEIGHT = 210
LEFT = 38
RIGHT = 10
TOP = 8
BOTTOM = 26
SIDE = 12  # left and right margin of drawings with a line per arm
LINE = 36  # height of such a line
LETTER_WIDTH = 7.2  # width of a character in labels
MAX_NAME_LENGTH = 14  # characters of a class name
COLOURS = 8
DASHES = 4


def looks(arm: int) -> str:
    """Return the CSS classes of an arm's line: one of eight colours and one of four dashes, for 32 different lines."""
    dash = (arm + arm // COLOURS) % DASHES
    return f"c{arm % COLOURS}" + (f" d{dash}" if dash else "")


@dataclass(frozen=True)
class Detail:
    """Limits on the number of marks in a drawing, lower for pages with many drawings.

    The limits keep a page below 2 MB.

    Attributes:
        touched: Number of points with a tooltip in a curve.
        points: Number of points in a curve.
        clients: Number of points in an arm's row of clients.
        squares: Number of squares for class counts.
    """

    touched: int
    points: int
    clients: int
    squares: int

    @classmethod
    def of(cls, cells: int, rows: int) -> "Detail":
        """Return the limits on marks per drawing, for a page with this many cells and rows.

        Args:
            cells: Number of cells.
            rows: Number of pairs of an arm and a cell, each with four curves.
        """

        def share(total: int, drawings: int, least: int, most: int) -> int:
            return min(most, max(least, total // max(1, drawings)))

        return cls(
            share(4000, 4 * rows, 2, 24),
            share(14000, 4 * rows, 10, 80),
            share(2500, rows, 10, 1000),
            share(2000, cells, 100, 2000),
        )


@dataclass(frozen=True)
class Curve:
    """The learning curve of one arm: mean, lowest and highest value over seeds, by round.

    Attributes:
        colour: Number of the arm, which has the same colour in all drawings.
        rounds: Evaluated rounds.
        mean: Mean over seeds by round, in [0, 1].
        low: Lowest value over seeds by round.
        high: Highest value over seeds by round.
        finish: Whether the last value was evaluated after the method's last phase instead of a round.
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
    """The mean of one arm in one cell, with its interval (None if there is none) and every seed's value."""

    name: str
    colour: int
    mean: float
    low: float | None
    high: float | None
    values: list[float]


@dataclass(frozen=True)
class Bars:
    """The bars of one arm: the mean of each class group (None if there is none) and the values by seed."""

    name: str
    colour: int
    means: list[float | None]
    seeds: list[list[float]]


@dataclass(frozen=True)
class Strip:
    """The accuracies of one arm's clients, lowest first."""

    name: str
    colour: int
    values: list[float]


def curves(each: Sequence[Curve], label: str, highest: float, detail: Detail) -> str:
    """Draw learning curves, each with a band from the lowest to the highest seed.

    A diamond marks the end of a method's last phase, or the only evaluated step.

    Args:
        each: The curves.
        label: Description for screen readers.
        highest: Value that the axis must reach; use the same value for drawings that are compared.
        detail: Number of marks.
    """
    last = max((curve.rounds[-1] for curve in each), default=1)
    top = _nice(highest)

    def x(round: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (round - 1) / max(1, last - 1)

    y = _height_of(top)
    parts = _axes(
        [(y(value), f"{100 * value:g}") for value in _ticks(top)],
        [(x(round), str(round)) for round in sorted({1, (1 + last) // 2, last})],
        "round",
    )
    for curve in each:
        parts += _curve(curve, x, y, detail)
    return svg(parts, label)


def _curve(curve: Curve, x: Callable[[float], float], y: Callable[[float], float], detail: Detail) -> list[str]:
    """Return the SVG elements of a curve: band, line and marks."""
    parts = []
    colour = f"c{curve.colour % COLOURS}"
    drawn = thinned(len(curve.rounds), detail.points)
    if curve.low != curve.high:
        upper = [(x(curve.rounds[i]), y(curve.high[i])) for i in drawn]
        lower = [(x(curve.rounds[i]), y(curve.low[i])) for i in reversed(drawn)]
        parts.append(f'<polygon class="band {colour}" points="{_points(upper + lower)}"/>')
    line = _points([(x(curve.rounds[i]), y(curve.mean[i])) for i in drawn])
    parts.append(
        f'<polyline class="line {looks(curve.colour)}" points="{line}"><title>{escape(curve.name)}</title></polyline>'
    )
    last = len(curve.rounds) - 1
    for i in thinned(len(curve.rounds), detail.touched):
        values = _range(curve.mean[i], curve.low[i], curve.high[i])
        if i == last and (curve.finish or last == 0):
            text = f"{curve.name}, {'after the last phase' if curve.finish else 'after the last round'}: {values}"
            parts.append(_diamond(x(curve.rounds[i]), y(curve.mean[i]), colour, text))
        else:
            text = f"{curve.name}, round {curve.rounds[i]}: {values}"
            parts.append(
                f'<circle class="touch {colour}" cx="{x(curve.rounds[i]):.1f}" cy="{y(curve.mean[i]):.1f}" r="4">'
                f"<title>{escape(text)}</title></circle>"
            )
    return parts


def estimates(each: Sequence[Estimate], label: str, show_unit: str = "%", scale: float = 100) -> str:
    """Draw one line per arm: its interval, a bar at its mean, and a point for every seed.

    Args:
        each: The estimates.
        label: Description for screen readers.
        show_unit: Unit of the displayed values.
        scale: Factor from values to displayed values.
    """
    lows = [value for e in each for value in [*e.values, e.mean if e.low is None else e.low]]
    highs = [value for e in each for value in [*e.values, e.mean if e.high is None else e.high]]
    low = min(lows, default=0.0)
    high = max(highs, default=1.0)
    space = 0.06 * (high - low) or 0.01
    low = max(min(0.0, low), low - space)  # start the axis at or above 0 if no value is negative
    high += space

    def x(value: float) -> float:
        return SIDE + (WIDTH - 2 * SIDE) * (value - low) / (high - low)

    height = TOP + BOTTOM + LINE * len(each)
    ticks = [(x(value / scale), f"{value:g}") for value in _even(low * scale, high * scale)]
    parts = _line_axis(height, ticks)
    for number, estimate in enumerate(each):
        parts += _estimate(estimate, TOP + LINE * number + 24, x, show_unit, scale)
    return svg(parts, label, height)


def _estimate(e: Estimate, y: int, x: Callable[[float], float], show_unit: str, scale: float) -> list[str]:
    colour = f"c{e.colour % COLOURS}"
    parts = [_name(e.name, y)]
    text = f"{e.name}: {scale * e.mean:.2f} {show_unit}"
    if e.low is not None and e.high is not None:
        text += f", interval {scale * e.low:.2f} to {scale * e.high:.2f}"
        parts.append(f'<line class="line {colour}" x1="{x(e.low):.1f}" x2="{x(e.high):.1f}" y1="{y}" y2="{y}"/>')
    parts.append(
        f'<rect class="fill {colour}" x="{x(e.mean) - 2:.1f}" y="{y - 7}" width="4" height="14">'
        f"<title>{escape(text)}</title></rect>"
    )
    for value in e.values:
        parts.append(
            f'<circle class="seed {colour}" cx="{x(value):.1f}" cy="{y}" r="3">'
            f"<title>{escape(e.name)}, a seed: {scale * value:.2f} {show_unit}</title></circle>"
        )
    return parts


def bars(groups: Sequence[str], each: Sequence[Bars], label: str) -> str:
    """Draw bars for each class group, one per arm, with a point for every seed."""
    top = _nice(max((value for arm in each for values in arm.seeds for value in values), default=1.0))
    y = _height_of(top)
    span = (WIDTH - LEFT - RIGHT) / len(groups)
    width = 0.8 * span / max(1, len(each))
    parts = _axes(
        [(y(value), f"{100 * value:g}") for value in _ticks(top)],
        [(LEFT + span * (g + 0.5), name) for g, name in enumerate(groups)],
        "",
    )
    for g, group in enumerate(groups):
        for number, arm in enumerate(each):
            mean = arm.means[g]
            if mean is None:
                continue
            x = LEFT + span * (g + 0.1) + width * number
            parts.append(
                f'<rect class="fill c{arm.colour % COLOURS}" x="{x + 0.5:.1f}" y="{y(mean):.1f}" '
                f'width="{max(1.0, width - 1):.1f}" height="{y(0) - y(mean):.1f}">'
                f"<title>{escape(arm.name)}, {group}: {100 * mean:.2f} %</title></rect>"
            )
            for value in arm.seeds[g]:
                parts.append(f'<circle class="dot" cx="{x + width / 2:.1f}" cy="{y(value):.1f}" r="1.5"/>')
    return svg(parts, label)


def strips(each: Sequence[Strip], label: str, detail: Detail) -> str:
    """Draw one line per arm: a bar at the mean, and points for all clients or an evenly spaced selection."""

    def x(value: float) -> float:
        return SIDE + (WIDTH - 2 * SIDE) * value

    height = TOP + BOTTOM + LINE * len(each)
    parts = _line_axis(height, [(x(value), f"{100 * value:g}") for value in (0.0, 0.25, 0.5, 0.75, 1.0)])
    for number, strip in enumerate(each):
        y = TOP + LINE * number + 24
        colour = f"c{strip.colour % COLOURS}"
        name = escape(strip.name)
        parts.append(_name(strip.name, y))
        for client in thinned(len(strip.values), detail.clients):
            value = strip.values[client]
            parts.append(
                f'<circle class="seed {colour}" cx="{x(value):.1f}" cy="{y}" r="3">'
                f"<title>{name}: {100 * value:.2f} % (number {client + 1} from below)</title></circle>"
            )
        mean = sum(strip.values) / len(strip.values)
        parts.append(
            f'<rect class="fill {colour}" x="{x(mean) - 1.5:.1f}" y="{y - 8}" width="3" height="16">'
            f"<title>{name}, mean: {100 * mean:.2f} %</title></rect>"
        )
    return svg(parts, label, height)


def holdings(counts: Sequence[Sequence[int]], names: Sequence[str], label: str, detail: Detail) -> str:
    """Draw the clients' class counts as squares whose areas are proportional to the numbers of samples.

    If there are many clients, only some are drawn, evenly spaced. If there are many classes, neighbouring classes share
    a column.

    Args:
        counts: Number of samples by client and class.
        names: Names of the classes.
        label: Description for screen readers.
        detail: Number of marks.
    """
    clients = thinned(len(counts), max(10, detail.squares // 10))
    columns = _columns(len(names), max(10, detail.squares // max(1, len(clients))))
    samples = [[sum(counts[client][c] for c in column) for column in columns] for client in clients]
    step = min(22.0, (WIDTH - LEFT - RIGHT) / max(1, len(columns)))
    tall = min(22.0, max(4.0, 420 / max(1, len(clients))))
    named = len(columns) == len(names) and step >= LETTER_WIDTH + 5  # minimum width for upright names
    longest = max(min(len(str(name)), MAX_NAME_LENGTH) for name in names) if named else 0
    upright = longest * LETTER_WIDTH > step
    below = 14 + (round(longest * LETTER_WIDTH) if upright else 12)
    height = round(TOP + tall * len(clients)) + below
    largest = max((count for row in samples for count in row), default=1) or 1
    parts = []
    for number, (client, row) in enumerate(zip(clients, samples, strict=True)):
        middle = TOP + tall * (number + 0.5)
        if len(clients) <= 40 or number % 10 == 0:
            parts.append(f'<text class="tick" x="{LEFT - 5}" y="{middle + 3.5:.1f}" text-anchor="end">{client}</text>')
        for c, count in enumerate(row):
            if count:
                side = max(0.8, min(step, tall) * 0.92 * (count / largest) ** 0.5)
                x = LEFT + step * (c + 0.5)
                parts.append(
                    f'<rect class="held" x="{x - side / 2:.1f}" y="{middle - side / 2:.1f}" '
                    f'width="{side:.1f}" height="{side:.1f}"><title>client {client}, '
                    f"{_class_text(columns[c], names)}: {count}</title></rect>"
                )
    for c in range(0, len(columns), 1 if named else max(1, -(-len(columns) // 12))):
        text = shortened(str(names[c])) if named else str(columns[c][0])
        middle = LEFT + step * (c + 0.5)
        parts.append(
            _upright(middle, height - below + 8, text) if upright else _tick(middle, height - 10, "middle", text)
        )
    return svg(parts, label, height)


def svg(parts: Sequence[str], label: str, height: int = HEIGHT) -> str:
    """Return a complete SVG drawing of the given elements, with a description for screen readers."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def shortened(name: str) -> str:
    """Return a name shortened to at most `MAX_NAME_LENGTH` characters."""
    return shorten(name, MAX_NAME_LENGTH, "…")


def thinned(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices below `count`, including the first and the last index."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _height_of(top: float) -> Callable[[float], float]:
    """Return a function that maps a value to its vertical position, for an axis that ends at `top`."""

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)

    return y


def _axes(ys: Sequence[tuple[float, str]], xs: Sequence[tuple[float, str]], label: str) -> list[str]:
    parts = []
    for y, text in ys:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
        )
    for number, (x, text) in enumerate(xs):
        labelled = bool(label) and number == len(xs) - 1
        words = f"{label} {text}" if labelled else text
        parts.append(_tick(min(x, WIDTH - 4), HEIGHT - 10, "end" if labelled else "middle", words))
    return parts


def _line_axis(height: int, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """Return the axis of a drawing that has one line per arm."""
    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="{SIDE}" x2="{WIDTH - SIDE}" y1="{bottom}" y2="{bottom}"/>']
    for x, text in ticks:
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_tick(x, height - 10, "middle", text))
    return parts


def _tick(x: float, y: int, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(x: float, y: int, text: str) -> str:
    """Return a text label that is rotated to read upwards and ends at (x, y)."""
    place = f"{x + 4:.1f} {y}"
    return f'<text class="tick" transform="translate({place}) rotate(-90)" text-anchor="end">{escape(text)}</text>'


def _name(name: str, y: int) -> str:
    return f'<text class="name" x="{SIDE}" y="{y - 10}">{escape(name)}</text>'


def _diamond(x: float, y: float, colour: str, text: str) -> str:
    corners = _points([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)])
    return f'<polygon class="fill {colour}" points="{corners}"><title>{escape(text)}</title></polygon>'


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _range(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:.2f} %" + (f" ({100 * low:.2f} to {100 * high:.2f})" if low != high else "")


def _nice(value: float) -> float:
    return next((top for top in (0.1, 0.2, 0.4, 0.6, 0.8) if value <= top), 1.0)


def _ticks(top: float) -> list[float]:
    return [round(top * i / 4, 4) for i in range(5)]


def _even(low: float, high: float) -> list[float]:
    """Return a few evenly spaced round numbers between `low` and `high`, for an axis."""
    span = high - low
    for step in (b * 10.0**e for e in range(-4, 7) for b in (1, 2, 5)):
        if span / step <= 6:
            first = -(-low // step)
            return [round((first + i) * step, 6) for i in range(int((high // step) - first) + 1)]
    return [low, high]


def _columns(classes: int, most: int) -> list[range]:
    """Split the classes into at most `most` ranges of consecutive classes, equally wide except the last."""
    width = max(1, -(-classes // most))
    return [range(first, min(first + width, classes)) for first in range(0, classes, width)]


def _class_text(column: range, names: Sequence[str]) -> str:
    if len(column) == 1:
        return f"class {escape(str(names[column[0]]))}"
    return f"classes {column[0]} to {column[-1]} together"
