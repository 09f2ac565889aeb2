"""That the mistakes of tests/mutants can still be made; a few are, as a sample of `make mutants`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutants_run", Path(__file__).parent / "mutants" / "run.py")
assert SPEC is not None
assert SPEC.loader is not None
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)
MUTANTS = run.mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_line_of_a_mutant_is_there_once_and_its_tests_exist(mutant):
    assert mutant.fault() is None
    assert mutant.why
    files = [test.partition("::")[0] for test in mutant.tests if test.startswith("tests/")]
    assert files
    assert all((run.ROOT / file).is_file() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sfd.labels", "fedsm.order", "mupfl.start", "bpfed.restart"])
def test_a_mutant_of_each_method_is_noticed(name):
    done = subprocess.run([sys.executable, run.__file__, name], capture_output=True, text=True)
    assert done.stdout == f"{name}: noticed\n1 of 1 mutants are noticed\n"
