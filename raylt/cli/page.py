"""`raylt page`: Markdown pages whose tables are written by `raylt compare`.

A table stands between two comments, of which the first is its command:

    <!-- raylt compare studies/results/digits.json --measure few -->
    <!-- end of raylt compare -->
"""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from raylt import store
from raylt.cli.compare import compare
from raylt.cli.options import out
from raylt.errors import ConfigError

START, END = "<!-- raylt compare ", "<!-- end of raylt compare -->"
BLOCK = re.compile(rf"({re.escape(START)}(.*?) -->\r?\n).*?({re.escape(END)})", re.DOTALL)
LIMIT = 2**26               # bytes of a page


def page(files: Annotated[list[Path], typer.Argument(metavar="PAGE.md [PAGE.md ...]", help="Markdown files with "
                                                     f"comments of the form {START}ARGUMENTS --> and {END}")]) -> None:
    """Write the tables of pages anew, each by the command in the comment above it; paths are as for that command."""
    pages = {file: (text, filled(text, str(file))) for file in files for text in [_read(file)]}
    for file, (text, written) in pages.items():
        if written != text:
            store.write(file, written)
        count, what = len(BLOCK.findall(text)), "written anew" if written != text else "all as they were"
        out.print(f"{file}: {count} tables, {what}", soft_wrap=True)


def _read(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a Markdown page")
    try:
        return store.read(file, LIMIT).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a page of text; give a Markdown file") from None


def filled(text: str, name: str = "page") -> str:
    """A page's text with every table written anew.

    Raises:
        ConfigError: a comment that starts a table has no end, or there is none; RayltError as of `raylt compare`.
    """
    starts, ends, blocks = text.count(START), text.count(END), len(BLOCK.findall(text))
    if not starts == ends == blocks:
        raise ConfigError(f"{name}: {starts} comments start a table and {ends} end one; each table needs both, in "
                          "this order")
    if not starts:
        raise ConfigError(f"{name}: no comment of the form {START}ARGUMENTS -->, so there is no table to write")
    return BLOCK.sub(lambda block: block[1] + "\n" + _table(block[2]) + "\n" + block[3], text)


def _table(arguments: str) -> str:
    """What `raylt compare ARGUMENTS --format markdown` prints."""
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigError(f"{START}{arguments} -->: {error}; close the quotation") from None
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(compare)
    printed = StringIO()
    with redirect_stdout(printed):
        typer.main.get_command(app).main([*words, "--format", "markdown"], "raylt compare",
                                         standalone_mode=False)
    return printed.getvalue()
