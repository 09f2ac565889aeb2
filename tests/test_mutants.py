"""That the mistakes of tests/mutants can still be made; a few are, as a sample of `make mutants`."""

import importlib.util
import random
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
@pytest.mark.parametrize("method", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_a_mutant_of_each_method_is_noticed(method, tmp_path):
    of_method = [mutant for mutant in MUTANTS if mutant.name.startswith(f"{method}.")]
    chosen = {"sfd": "sfd.labels"}.get(method) or random.Random(0).choice(of_method).name
    mutant = next(mutant for mutant in of_method if mutant.name == chosen)
    assert run.survives(mutant, run.copy_to(tmp_path)) is None, mutant
