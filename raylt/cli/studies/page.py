"""The command `raylt page`: update tables in Markdown pages with the output of `raylt compare`.

A table is between two comments. The first comment has the arguments of the command:

    <!-- raylt compare studies/results/digits.json --measure few -->
    <!-- end of raylt compare -->
"""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from raylt import store
from raylt.cli.options import out
from raylt.cli.studies.compare import compare, results_read_once
from raylt.disk import is_file
from raylt.errors import CheckpointError, ConfigError, count_of

START = "<!-- raylt compare "
END = "<!-- end of raylt compare -->"
BLOCK = re.compile(rf"({re.escape(START)}(.*?) -->\r?\n).*?({re.escape(END)})", re.DOTALL)
MAX_PAGE_BYTES = 2**26
UsageError: Any = typer.BadParameter.__mro__[1]  # from the copy of click that typer may include


def page(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="PAGE.md [PAGE.md ...]",
            help=f"Markdown files with comments of the form {START}ARGUMENTS --> and {END}",
        ),
    ],
) -> None:
    """Update the tables of Markdown pages: run the command in the comment above each table, in this folder."""
    texts = {file: _read(file) for file in files}
    # fill all pages before writing any, so that an error leaves all pages unchanged
    with results_read_once():
        filled_texts = {file: filled(text, str(file)) for file, text in texts.items()}
    for file, text in texts.items():
        changed = filled_texts[file] != text
        if changed:
            store.write(file, filled_texts[file])
        state = "updated" if changed else "unchanged"
        out.print(f"{file}: {count_of(len(BLOCK.findall(text)), 'table')}, {state}", soft_wrap=True)


def filled(text: str, name: str = "page") -> str:
    """Return the text of a Markdown page with all its tables updated.

    Args:
        text: Content of the page in Markdown.
        name: Name of the page in error messages.

    Raises:
        ConfigError: A comment that starts a table has no matching end, or the page has no such comments.
        RayltError: `raylt compare` failed; the error names the page and the comment.
    """
    starts = text.count(START)
    ends = text.count(END)
    blocks = len(BLOCK.findall(text))
    if not starts == ends == blocks:
        raise ConfigError(
            f"{name}: the comments around tables do not pair up ({starts} start a table, {ends} end one). Put "
            f"{START}ARGUMENTS --> above each table and {END} below it.",
            code="file.malformed",
            path=name,
            starts=starts,
            ends=ends,
        )
    if not starts:
        raise ConfigError(
            f"{name}: has no table to update. Add the comments {START}ARGUMENTS --> and {END}.",
            code="file.malformed",
            path=name,
            starts=0,
            ends=0,
        )
    return BLOCK.sub(lambda block: block[1] + "\n" + _table(block[2], name) + "\n" + block[3], text)


def _read(file: Path) -> str:
    if not is_file(file):
        raise ConfigError(f"{file}: no such file. Give a Markdown page.", code="file.not-found", path=str(file))
    try:
        return store.read(file, MAX_PAGE_BYTES).decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{file}: is not text. Give a Markdown page.", code="file.malformed", path=str(file)
        ) from None


def _table(arguments: str, name: str) -> str:
    """Return the output of `raylt compare ARGUMENTS --format markdown`.

    Args:
        arguments: Arguments of a comment.
        name: Name of the comment's page in error messages.
    """
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigError(
            f"{name}: a comment cannot be parsed ({START}{arguments} -->: {error}). Close the quotation.",
            code="file.malformed",
            value=arguments,
        ) from None
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(add_help_option=False)(compare)  # --help would print no table
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            command = typer.main.get_command(app)
            code = command.main([*words, "--format", "markdown"], "raylt compare", standalone_mode=False)
    except UsageError as error:
        reason = error.format_message().replace("Value error, ", "").rstrip(".")
        raise ConfigError(
            f"{name}: raylt compare does not accept a comment's arguments ({reason}). Use that command's arguments.",
            code="file.malformed",
            value=arguments,
        ) from None
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{name}, raylt compare {arguments}: {error}", code=error.code, **error.details) from None
    table = printed.getvalue()
    if code or not any(line.startswith("|") for line in table.splitlines()):
        raise ConfigError(
            f"{name}, raylt compare {arguments}: prints no table. Give arguments of a comparison.",
            code="file.malformed",
            value=arguments,
        )
    return table
