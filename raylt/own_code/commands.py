"""Shell commands and Python calls in messages, with the plugin files of this process."""

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from raylt.errors import quoted, spoken
from raylt.own_code.module_sources import PLUGIN


def plugin_files() -> list[str]:
    """Return the paths of the plugin files that this process has loaded.

    Plugins that were registered as values have no file.
    """
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(PLUGIN)]


def plugin_options(files: Iterable[str] | None = None) -> list[str]:
    """Return an option --plugin for each file, by default for each plugin file that this process has loaded.

    A path below the current folder becomes relative.
    """
    return [word for file in (plugin_files() if files is None else files) for word in ("--plugin", _from_here(file))]


def own_command(command: str, *arguments: object, plugins: Iterable[str] | None = None) -> str:
    """Return a command of raylt, quoted for the shell.

    Args:
        command: Name of the command.
        arguments: Its arguments and options.
        plugins: The plugin files that the command needs, by default those that this process has loaded.
    """
    words = [quoted(word) if isinstance(word, Path) else shlex.quote(str(word)) for word in arguments]
    return " ".join(["raylt", command, *map(shlex.quote, plugin_options(plugins)), *words])


def resume_call(folder: Path) -> str:
    """Return the shell command or Python call that continues a run, for messages."""
    return spoken(own_command("resume", folder), f"raylt.resume({str(folder)!r})")


def _from_here(file: str) -> str:
    try:
        path = os.path.relpath(file)
    except OSError:  # the current folder was removed
        return file
    return file if path.startswith(os.pardir) else path
