"""Starts Python processes that import the same modules as this one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def start_python(*arguments: str, environment: Mapping[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a Python process that has the import path of this one.

    Without -P, a file of the current folder, such as random.py, would be imported in place of a package.

    Args:
        arguments: of the interpreter, as in "-m", "MODULE".
        environment: variables that the process has besides those of this process.
        options: of `subprocess.Popen`.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", *arguments], env=os.environ | environment | {"PYTHONPATH": path}, **options
    )
