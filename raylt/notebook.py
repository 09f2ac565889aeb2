"""Output in notebooks: tables as HTML, and a cell output that is updated in place."""

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any

from rich.table import Table


def in_notebook() -> bool:
    """Return whether this process runs a notebook, not a plain IPython terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


class Output:
    """An output of the running notebook cell; each call of `show` replaces the output's content."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, html: str) -> None:
        """Replace the content of the output."""
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]  # only notebooks have it

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    right: Iterable[int] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return a table as HTML, in the style of the notebook.

    Args:
        head: Titles of the columns; empty for a table without a heading.
        rows: Cells of each row, as plain text.
        title: Text above the table.
        right: Indices of right-aligned columns.
        notes: Lines below the table.
    """
    to_the_right = set(right)

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ("right" if column in to_the_right else "left" for column in range(len(cells)))
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
        )

    caption = f'<caption style="text-align:left">{escape(title)}</caption>' if title else ""
    heading = f"<thead><tr>{line(head, 'th')}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return f"<table>{caption}{heading}<tbody>{body}</tbody></table>{below}"


def html_of(table: Table) -> str:
    """Convert a table for a terminal to HTML."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    head = [str(column.header) for column in table.columns] if table.show_header else []
    right = [number for number, column in enumerate(table.columns) if column.justify == "right"]
    title = None if table.title is None else str(table.title)
    return html_table(head, list(zip(*columns, strict=True)), title, right)


def later(module: str, function: str) -> Callable[..., Any]:
    """Import a function when it is needed, from a module that the caller must not import at the top.

    For example, a run has methods that draw it, although its module must not import the module that draws.
    """
    return getattr(import_module(module), function)
