"""Stores measured figures as JSON in benchmarks/results, and writes their tables into pages, such as docs/privacy.md.

A table is written between two comments of the page, so that nothing is typed.

    <!-- benchmarks/NAME.py --page -->
    <!-- end of benchmarks/NAME.py -->
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "privacy.md"


def keep(name: str, figures: dict[str, Any]) -> None:
    """Store the figures that a script measured."""
    (HERE / "results" / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def kept(name: str) -> dict[str, Any]:
    """Return the stored figures of a script's last measurement."""
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def filled(text: str, name: str, table: str, page: str = PAGE.name) -> str:
    """Return the text of a page with a script's table in its place.

    Raises:
        ValueError: the page has no such place, or several.
    """
    start, end = f"<!-- benchmarks/{name}.py --page -->\n", f"<!-- end of benchmarks/{name}.py -->"
    place = re.compile(f"({re.escape(start)}).*?({re.escape(end)})", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise ValueError(f"{page}: {len(place.findall(text))} places for the table of {name}, not one")
    return place.sub(lambda block: f"{block[1]}\n{table}\n\n{block[2]}", text)


def write(name: str, table: str, page: Path = PAGE) -> None:
    """Write a script's table into a page."""
    page.write_text(filled(page.read_text(), name, table, page.name))


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table_of(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([row(*head), "|" + "---|" * len(head), *(row(*cells) for cells in rows)])
