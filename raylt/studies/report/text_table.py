"""`TextTable`: a table, followed by more tables and notes, as terminal text, Markdown, HTML or LaTeX."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from rich import box
from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from raylt.notebook import html_table
from raylt.runs.callbacks.console import UNSAFE

_TAG = re.compile(r"<(?=[A-Za-z/!?])")  # does not match a text such as "p < 0.05"
_TEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "%&_#${}"},
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "|": r"\textbar{}",
        ">": "$>$",
        "<": "$<$",
        "±": r"$\pm$",
    }
)
_NEGATIVE = re.compile(r"-\d")
Places = dict[tuple[int, int], int]  # by row and column: 1 for the best value, 2 for the second-best


@dataclass(frozen=True)
class TextTable:
    """A table of texts with a title, followed by more tables and by notes.

    Attributes:
        columns: Alignment of the columns, one letter each: l, or r for figures, which are not wrapped.
        grouped: Whether rows are grouped by their first cell, which is then shown once for each group.
        naming: Number of leading columns that name a row. On a narrow terminal, the other columns are split into
            several tables, each with the naming columns. With 0, the columns stay together and cells are wrapped.
        further: Title, heading and rows of each further table below.
        notes: Heading and lines of each list below; empty lists are left out.
        places: Cells with the best and second-best figures, which LaTeX prints in bold and underlined.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    columns: str
    grouped: bool = True
    naming: int = 0
    further: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    places: Places = field(default_factory=dict)

    def screen(self) -> Group:
        """Return the table for a terminal."""
        parts: list[_AsWideAsFits | Table | Text] = [_AsWideAsFits(self)]
        for title, head, rows in self.further:
            more = _table(head)
            for row in rows:
                more.add_row(*row)
            parts += [Text(""), _title(title), more]
        parts += [
            Text(f"\n{heading}:\n" + "\n".join(f"  {line}" for line in lines))
            for heading, lines in self.notes.items()
            if lines
        ]
        return Group(*parts)

    def table(self, columns: Sequence[int]) -> Table:
        """Return some of the columns as a table of the library rich."""
        table = _table([self.head[index] for index in columns])
        for column, index in zip(table.columns, columns, strict=True):
            if self.columns[index] == "r":
                column.justify = "right"
                column.no_wrap = True
        for row, starts in zip(self._rows(), self._starts(), strict=True):
            if starts:
                table.add_section()
            table.add_row(*(row[index] for index in columns))
        return table

    def html(self) -> str:
        """Return HTML for a notebook: the table, then the further tables and the notes."""
        right = [number for number, letter in enumerate(self.columns) if letter == "r"]
        parts = [html_table(self.head, self._rows(), self.title, right)]
        parts += [html_table(head, rows, title) for title, head, rows in self.further]
        parts += [
            f"<div>{escape(heading)}: {escape('; '.join(lines))}</div>"
            for heading, lines in self.notes.items()
            if lines
        ]
        return UNSAFE.sub("?", "".join(parts))

    def markdown(self) -> str:
        """Return the table in Markdown, in GitHub's syntax for tables."""
        lines = [f"**{markdown_text(self.title)}**", "", *_pipes(self.head, self.rows)]
        for title, head, rows in self.further:
            lines += ["", f"**{markdown_text(title)}**", "", *_pipes(head, rows)]
        for heading, entries in self.notes.items():
            if entries:
                items = [f"- {markdown_text(entry)}" for entry in entries]
                lines += ["", f"{heading[0].upper()}{heading[1:]}:", "", *items]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """Return a LaTeX tabular (booktabs) with each column's best figure in bold and second-best underlined.

        The facts for the caption, further tables and notes are in comments.
        """
        second = ", the second underlined" if 2 in self.places.values() else ""
        ranked = [f"in each column the best mean is bold{second}"] if self.places else []
        lines = [
            r"% \usepackage{booktabs}",
            *(f"% {_line(text)}" for text in [self.title, *ranked]),
            rf"\begin{{tabular}}{{{self.columns}}}",
            r"\toprule",
            " & ".join(map(_tex, self.head)) + r" \\",
            r"\midrule",
        ]
        for index, (row, starts) in enumerate(zip(self._rows(), self._starts(), strict=True)):
            cells = [self._ranked(_tex(cell), index, column) for column, cell in enumerate(row)]
            lines += [*([r"\midrule"] if starts else []), " & ".join(cells) + r" \\"]
        lines += [r"\bottomrule", r"\end{tabular}"]
        for title, _, rows in self.further:
            lines += [f"% {_line(title)}", *(f"%   {_line(', '.join(row))}" for row in rows)]
        lines += [f"% {heading}: {_line(entry)}" for heading, entries in self.notes.items() for entry in entries]
        return "\n".join(lines) + "\n"

    def _ranked(self, cell: str, row: int, column: int) -> str:
        """Return a LaTeX cell, in bold if its figure is the best and underlined if it is the second-best.

        The number after ± is never bold, since that would suggest that the interval is the best.
        """
        command = {1: r"\textbf", 2: r"\underline"}.get(self.places.get((row, column), 0))
        if command is None:
            return cell
        figure, sign, spread = cell.partition(r" $\pm$")
        return f"{command}{{{figure}}}{sign}{spread}"

    def _starts(self) -> list[bool]:
        """Return whether each row starts a new group of rows; the first row counts as False."""
        return [self.grouped and index > 0 and row[0] != self.rows[index - 1][0] for index, row in enumerate(self.rows)]

    def _rows(self) -> list[list[str]]:
        """Return the rows with each group's name only in the group's first row."""
        return [
            row if not self.grouped or index == 0 or starts else ["", *row[1:]]
            for index, (row, starts) in enumerate(zip(self.rows, self._starts(), strict=True))
        ]


@dataclass(frozen=True)
class _AsWideAsFits:
    """A table that is split into several tables if its columns do not fit the terminal."""

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        table = self.table
        naming = list(range(table.naming))
        yield _title(table.title)
        if not naming:
            yield table.table(range(len(table.head)))
            return
        part: list[int] = []
        for column in range(len(naming), len(table.head)):
            wider = table.table([*naming, *part, column])
            width = Measurement.get(console, options.update(width=10_000), wider).maximum
            if part and width > options.max_width:
                yield table.table([*naming, *part])
                yield Text("")
                part = []
            part.append(column)
        yield table.table([*naming, *part])


def _title(title: str) -> Text:
    """Return the title of a table as a separate line, since rich would wrap it at the width of the table."""
    return Text(title, style="table.title")


def _table(head: Sequence[str]) -> Table:
    return Table(*head, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _line(text: str) -> str:
    """Return a text without line breaks and control characters."""
    return UNSAFE.sub("?", text.replace("\n", "?").replace("\t", " "))


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown, with HTML and links disabled."""
    return _TAG.sub("&lt;", _line(text)).replace("](", "]\\(")


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(markdown_text(cell).replace('|', '/') for cell in row)} |" for row in rows),
    ]


def _tex(text: str) -> str:
    """Escape a cell for LaTeX.

    A leading [ or * is protected, since it would be an argument of the previous row's end.
    """
    text = _line(text)
    if text == "-":
        return "--"
    sign = "$-$" if _NEGATIVE.match(text) else ""
    text = text.removeprefix("-" if sign else "").translate(_TEX)
    return sign + (f"{{{text[0]}}}{text[1:]}" if text[:1] in ("[", "*") else text)
