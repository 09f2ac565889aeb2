"""Starts Python processes that import the same modules as this process."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_python(*arguments: str, environment: Mapping[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a Python process with the import path of this process.

    The option -P prevents a file in the current folder, such as random.py, from being imported in place of a package.

    Args:
        arguments: Arguments of the interpreter, as in "-m", "MODULE".
        environment: Additional environment variables.
        options: Options of `subprocess.Popen`.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", *arguments], env=os.environ | environment | {"PYTHONPATH": path}, **options
    )
