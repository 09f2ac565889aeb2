"""`Sheet`: a table with what stands under it, for a terminal, as Markdown and as LaTeX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_TEX = str.maketrans({
    **{sign: f"\\{sign}" for sign in "%&_#${}"}, "\\": r"\textbackslash{}", "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}", "|": r"\textbar{}", ">": "$>$", "<": "$<$", "±": r"$\pm$"})


@dataclass(frozen=True)
class Sheet:
    """Rows of text under a heading, further tables, and lists of lines.

    Attributes:
        columns: one letter for each column: l, or r for figures that are not to be wrapped.
        grouped: rows are grouped by their first cell, which is written once for each group.
        naming: first columns that name a row. Where a terminal is too narrow for all others, these stand beside each
            part of them; 0 never parts the columns, and cells are wrapped.
        further: title, heading and rows of the tables below.
        notes: heading and lines of the lists below; empty ones are left out.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    columns: str
    grouped: bool = True
    naming: int = 0
    further: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def screen(self) -> Group:
        """What a person reads on a terminal."""
        parts: list[_AsWideAsFits | Table | Text] = [_AsWideAsFits(self)]
        for title, head, rows in self.further:
            more = _table(title, head)
            for row in rows:
                more.add_row(*row)
            parts += [Text(""), more]
        parts += [Text(f"\n{heading}:\n" + "\n".join(f"  {line}" for line in lines))
                  for heading, lines in self.notes.items() if lines]
        return Group(*parts)

    def table(self, columns: Sequence[int], title: str | None) -> Table:
        """The rows with some of their columns."""
        table = _table(title, [self.head[at] for at in columns])
        for column, at in zip(table.columns, columns, strict=True):
            if self.columns[at] == "r":
                column.justify, column.no_wrap = "right", True
        for row, starts in zip(self._rows(), self._starts(), strict=True):
            if starts:
                table.add_section()
            table.add_row(*(row[at] for at in columns))
        return table

    def markdown(self) -> str:
        """Tables that GitHub and every Markdown reader draws."""
        lines = [f"**{self.title}**", "", *_pipes(self.head, self.rows)]
        for title, head, rows in self.further:
            lines += ["", f"**{title}**", "", *_pipes(head, rows)]
        for heading, entries in self.notes.items():
            if entries:
                lines += ["", f"{heading[0].upper()}{heading[1:]}:", "", *(f"- {entry}" for entry in entries)]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """A tabular for booktabs; what stands below the table are comments."""
        lines = [f"% {self.title}", rf"\begin{{tabular}}{{{self.columns}}}", r"\toprule",
                 " & ".join(map(_tex, self.head)) + r" \\", r"\midrule"]
        for row, starts in zip(self._rows(), self._starts(), strict=True):
            lines += [*([r"\midrule"] if starts else []), " & ".join(map(_tex, row)) + r" \\"]
        lines += [r"\bottomrule", r"\end{tabular}"]
        for title, _, rows in self.further:
            lines += [f"% {title}", *(f"%   {', '.join(row)}" for row in rows)]
        lines += [f"% {heading}: {entry}" for heading, entries in self.notes.items() for entry in entries]
        return "\n".join(lines) + "\n"

    def _starts(self) -> list[bool]:
        """Whether a group starts at a row that is not the first."""
        return [self.grouped and place > 0 and row[0] != self.rows[place - 1][0] for place, row in enumerate(self.rows)]

    def _rows(self) -> list[list[str]]:
        """The rows, a group's name in its first row alone."""
        return [row if not self.grouped or place == 0 or starts else ["", *row[1:]]
                for place, (row, starts) in enumerate(zip(self.rows, self._starts(), strict=True))]


@dataclass(frozen=True)
class _AsWideAsFits:
    """A sheet's rows as one table, or as several below each other where their columns do not fit side by side."""

    sheet: Sheet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        sheet, naming = self.sheet, list(range(self.sheet.naming))
        if not naming:
            yield sheet.table(range(len(sheet.head)), sheet.title)
            return
        part, title = list[int](), sheet.title
        for at in range(len(naming), len(sheet.head)):
            wider = sheet.table([*naming, *part, at], None)
            if part and Measurement.get(console, options.update(width=10_000), wider).maximum > options.max_width:
                yield sheet.table([*naming, *part], title)
                yield Text("")
                part, title = [], None
            part.append(at)
        yield sheet.table([*naming, *part], title)


def _table(title: str | None, head: Sequence[str]) -> Table:
    return Table(*head, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head),
            *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]


def _tex(text: str) -> str:
    """A cell as LaTeX reads it; a row that began with [ or * would give arguments to what ends the row before it."""
    text = text.translate(_TEX)
    return f"{{{text[0]}}}{text[1:]}" if text[:1] in ("[", "*") else text
