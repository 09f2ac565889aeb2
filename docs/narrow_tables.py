"""Sphinx extension: tables with sentences in them show a row as a block of lines on a narrow screen (site.css).

A line is `title of the column: cell`, so no column is out of sight. Tables of figures keep their columns and scroll.
"""

from statistics import mean

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

SENTENCE = 20  # characters of the mean cell from which a column holds sentences rather than figures


def mark_tables(_app: Sphinx, page: nodes.document, _name: str) -> None:
    """Give tables with sentences the class `stacked`, and each cell that is not empty the title of its column."""
    for table in page.findall(nodes.table):
        titles, *rows = [[cell.astext() for cell in row] for row in table.findall(nodes.row)]
        if len(titles) < 3 or not rows or max(mean(map(len, column)) for column in zip(*rows, strict=True)) < SENTENCE:
            continue
        table["classes"].append("stacked")
        for row in list(table.findall(nodes.row))[1:]:
            for cell, title in zip(row, titles, strict=True):
                if cell.astext():  # site.css hides the others
                    cell["title"] = title


def visit_cell(translator: HTML5Translator, node: nodes.entry) -> None:
    """Write the start of a cell with the title of its column, which site.css shows."""
    HTML5Translator.visit_entry(translator, node)
    if node.get("title"):
        title = translator.attval(node["title"])
        translator.body[-1] = translator.body[-1].replace(">", f' data-title="{title}">', 1)


def leave_cell(translator: HTML5Translator, node: nodes.entry) -> None:
    HTML5Translator.depart_entry(translator, node)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", mark_tables)
    app.add_node(nodes.entry, override=True, html=(visit_cell, leave_cell))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
