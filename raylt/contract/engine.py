"""Runs the checks on a method."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raylt.contract.case import Case
from raylt.contract.checks import CHECKS, Check
from raylt.contract.declarations import Broken
from raylt.core.method import Method
from raylt.errors import one_line


@dataclass(frozen=True)
class Result:
    """What one check came to.

    Attributes:
        what: what the method keeps to.
        fault: what it does instead; None where all is well.
    """

    case: str
    what: str
    fault: str | None


def run_checks(method: Method) -> Iterator[Result]:
    """The checks on each kind of problem that a method is for, in order."""
    for kind in method.problems:
        with tempfile.TemporaryDirectory(prefix="raylt-check-") as folder:
            case = Case(method, kind, Path(folder))
            for check in CHECKS:
                yield Result(str(case), check.__doc__ or check.__name__, fault_of(check, case))


def fault_of(check: Check, case: Case) -> str | None:
    """What a method does that a check forbids, in one line; or None."""
    try:
        check(case)
    except Broken as broken:
        return str(broken)
    except Exception as error:          # whatever the method's own code trips over
        return one_line(error)
    return None
