"""Run plausible mistakes ("mutants"), each of which the tests must notice.

    python tests/mutants/run.py [--check] [WORD]        `make mutants` runs all

Each table of tests/mutants/*.toml names a file, a function in it, code that occurs once in that function, the code
that replaces it, why that matters, and the tests that must fail. Code is compared as a syntax tree, so layout does
not matter. A function that has moved to another file is found there. Recipes have no functions, so their text is
compared.

The mistakes are made one after the other in a copy of the project. WORD selects those whose name contains it.
`--check` only tests that all mistakes can be made. The exit code is 1 if a mutant survives or cannot be made.
"""

import ast
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from rewrite import NotFoundOnce, definitions, parse, replace

ROOT = Path(__file__).parents[2]
PACKAGES = ("raylt", "actors", "tune")
COPIED = (*PACKAGES, "studies", "tests", "pyproject.toml")
FAST = ("-m", "not slow or sampled")  # arguments of pytest


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: File of the table and name in it, as "sfd.labels".
        file: Where the function is, from the root of the project.
        function: Qualified name as "SFD.finish", the name of a class, or "" for the module.
        old: Code that occurs once in the function.
        new: The code that replaces it.
        why: What the mistake would do to results.
        tests: Arguments of pytest.
    """

    name: str
    file: str
    function: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def fault(self) -> str | None:
        """Return why the mutant cannot be made or tested, or None."""
        files = self.files()
        missing = [file for file in files if not (ROOT / file).is_file()]
        if missing or not files:
            return f"its test file {missing[0]} does not exist" if missing else "it names no test file"
        try:
            file, mutated = self.made(ROOT)
            if file.suffix == ".py":
                compile(mutated, file, "exec")
                same = ast.dump(parse(self.old)) == ast.dump(parse(self.new))
            else:
                same = self.old == self.new
        except (NotFoundOnce, SyntaxError) as error:
            return str(error)
        return "it changes nothing" if same else None

    def files(self) -> list[str]:
        """Return the test files among the arguments of pytest."""
        return [test.partition("::")[0] for test in self.tests if test.startswith("tests/")]

    def made(self, root: Path) -> tuple[Path, str]:
        """Return the file of a project that holds the function, and its text with the mistake."""
        if not self.file.endswith(".py"):
            return root / self.file, _replace_text((root / self.file).read_text(), self.old, self.new)
        files = self._files(root)
        made, fault = [], NotFoundOnce(f"no source defines {self.function}")
        for file in files:
            try:
                made.append((file, replace(file.read_text(), self.function, self.old, self.new)))
            except NotFoundOnce as error:
                fault = error
        if len(made) > 1:
            raise NotFoundOnce(f"{self.file} is gone, and {len(made)} other sources hold the old code")
        if not made:
            raise fault
        return made[0]

    def _files(self, root: Path) -> list[Path]:
        """Return the named file, or all sources that define the function if that file no longer does."""
        file = root / self.file
        if file.is_file() and definitions(file.read_text(), self.function):
            return [file]
        sources = [source for package in PACKAGES for source in sorted((root / package).rglob("*.py"))]
        return [source for source in sources if definitions(source.read_text(), self.function)]


def _replace_text(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise NotFoundOnce(f"the old text occurs {text.count(old)} times")
    return text.replace(old, new)


def mutants() -> list[Mutant]:
    """Return all mutants. A table without `file` or `tests` takes those at the top of its TOML file."""
    return [
        Mutant(
            f"{path.stem}.{name}",
            table.get("file", tables.get("file")),
            table.get("function", ""),
            table["old"],
            table["new"],
            table["why"],
            tuple(table.get("tests", tables.get("tests", []))),
        )
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for tables in [tomllib.loads(path.read_text())]
        for name, table in tables.items()
        if isinstance(table, dict)
    ]


def survives(mutant: Mutant, copy: Path) -> str | None:
    """Test a mutant in a copy of the project; return why it survives, or None if its tests fail.

    The named tests (`-k`) without the slow ones come first, which only saves time: if they pass or do not exist, all
    tests of the files decide.
    """
    file, mutated = mutant.made(copy)
    source = file.read_text()
    file.write_text(mutated)
    try:
        code = outcome(copy, [*FAST, *mutant.tests])
        if code != 1:
            code = outcome(copy, mutant.files())
    finally:
        file.write_text(source)
    if code == 1:  # the tests were run and one failed
        return None
    return "survives" if code == 0 else f"pytest ended with code {code}: {(copy / 'out').read_text()[-300:]}"


def outcome(copy: Path, tests: Iterable[str]) -> int:
    """Return the exit code of pytest for tests of a copy."""
    child = os.fork()  # the fork has torch in memory already, which takes seconds to load
    if child == 0:
        _run_tests(copy, list(tests))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_tests(copy: Path, tests: list[str]) -> NoReturn:
    """Run tests of the copy in this process, with the copy's code, and exit with pytest's code."""
    code = 2
    try:
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        out = os.open("out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--rootdir={copy}", *tests])
    finally:
        os._exit(int(code))


def copy_to(folder: Path) -> Path:
    """Copy the parts of the project that tests need to a folder; return the folder."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def check(chosen: Iterable[Mutant]) -> bool:
    """Print which mutants cannot be made or tested, and return whether there are none."""
    faults = {mutant.name: fault for mutant in chosen if (fault := mutant.fault())}
    for name, fault in faults.items():
        print(f"{name}: {fault}")
    return not faults


def show_table(chosen: Iterable[Mutant], noticed: Iterable[Mutant]) -> None:
    """Print the number of mutants and of noticed mutants for each TOML file."""
    asked, got = (Counter(mutant.name.partition(".")[0] for mutant in each) for each in (chosen, noticed))
    print(f"{'file':12} mutants noticed")
    for name, count in asked.items():
        print(f"{name:12} {count:7} {got[name]:7}")
    print(f"{'all':12} {asked.total():7} {got.total():7}")


def main(*arguments: str) -> int:
    word = "".join(argument for argument in arguments if argument != "--check")
    chosen = [mutant for mutant in mutants() if word in mutant.name]
    if not chosen:
        print(f"no mutant has {word!r} in its name; give one part of a name, as in sfd or sfd.labels", file=sys.stderr)
        return 2
    if not check(chosen):
        return 1
    if "--check" in arguments:
        print(f"all {len(chosen)} mutants can be made")
        return 0
    noticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_to(Path(folder))
        files = {file for mutant in chosen for file in mutant.files()}
        if outcome(copy, sorted(files)):  # tests that fail without a mutant cannot notice one
            print(f"without any mutant: {(copy / 'out').read_text()[-300:]}")
            return 1
        for mutant in chosen:
            fault = survives(mutant, copy)
            if fault is None:
                noticed.append(mutant)
            print(f"{mutant.name}: {f'{fault} ({mutant.why})' if fault else 'noticed'}", flush=True)
    show_table(chosen, noticed)
    return int(len(noticed) < len(chosen))


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    # bytecode of the previous mutant could be reused for a file of the same time and size
    sys.dont_write_bytecode = True
    sys.exit(main(*sys.argv[1:]))
