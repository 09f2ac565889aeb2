"""Plausible mistakes, each of which the fast tests must notice: `make mutants`, or python tests/mutants/run.py [WORD].

Each table of tests/mutants/*.toml names a file, a text that occurs in it once, what the mistake makes of it, why that
matters and the tests that must fail. It is made in a copy of the project, one after the other. With a word only those
whose name holds it are run. A mutant that survives, or whose line is gone, ends this with code 1.
"""

import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch

ROOT = Path(__file__).parents[2]
COPIED = ("raylt", "actors", "tune", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: file of the table and name in it, as "sfd.labels".
        file: where it is made, from the root of the project.
        line: a text that occurs there once; `becomes`: what stands there instead.
        why: what it would do to results.
        tests: arguments of pytest.
    """

    name: str
    file: str
    line: str
    becomes: str
    why: str
    tests: tuple[str, ...]

    def fault(self) -> str | None:
        """Why it cannot be made, or None."""
        times = (ROOT / self.file).read_text().count(self.line)
        if self.line == self.becomes:
            return "changes nothing"
        return None if times == 1 else f"its line occurs {times} times in {self.file}"


def mutants() -> list[Mutant]:
    """All of them; a table [name] may leave out `file` and `tests`, which then are those at the top of its file."""
    return [Mutant(f"{path.stem}.{name}", table.get("file", tables.get("file")), table["line"], table["becomes"],
                   table["why"], tuple(table.get("tests", tables.get("tests", []))))
            for path in sorted(Path(__file__).parent.glob("*.toml")) for tables in [tomllib.loads(path.read_text())]
            for name, table in tables.items() if isinstance(table, dict)]


def survives(mutant: Mutant, copy: Path) -> str | None:
    """What is wrong with a mutant, made in a copy of the project, that does not fail its tests; or None."""
    file = copy / mutant.file
    source = file.read_text()
    file.write_text(source.replace(mutant.line, mutant.becomes))
    try:
        code = outcome(copy, mutant.tests)
    finally:
        file.write_text(source)
    if code == 1:                               # tests were run, and one failed
        return None
    return "survives" if code == 0 else f"pytest ended with code {code}: {(copy / 'out').read_text()[-300:]}"


def outcome(copy: Path, tests: Iterable[str]) -> int:
    """The exit code of pytest for tests of a copy."""
    child = os.fork()                           # of a process that has torch in memory: loading it takes seconds
    if child == 0:
        _run_tests(copy, list(tests))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_tests(copy: Path, tests: list[str]) -> NoReturn:
    """In a process of its own: runs tests of the copy with the copy's code, and ends with pytest's exit code."""
    code = 2
    try:
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        out = os.open("out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", f"--rootdir={copy}", *tests])
    finally:
        os._exit(int(code))


def copy_to(folder: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def main(word: str = "") -> int:
    bad = 0
    chosen = [mutant for mutant in mutants() if word in mutant.name]
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_to(Path(folder))
        files = {test for mutant in chosen for test in mutant.tests if test.startswith("tests/")}
        if outcome(copy, sorted(files)):        # who fails anyway notices nothing
            print(f"without any mutant: {(copy / 'out').read_text()[-300:]}")
            return 1
        for mutant in chosen:
            fault = mutant.fault() or survives(mutant, copy)
            bad += fault is not None
            print(f"{mutant.name}: {fault or 'noticed'}" + (f" ({mutant.why})" if fault else ""), flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants are noticed")
    return int(bad > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)                    # threads do not survive a fork
    sys.dont_write_bytecode = True              # a mutant of the same second and size must not be taken for the last
    sys.exit(main(*sys.argv[1:]))
