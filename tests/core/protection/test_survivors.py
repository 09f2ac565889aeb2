"""The number of members that must survive, and no import of the library for masks without secure sums."""

import subprocess
import sys

import pytest

from raylt.core.protection.survivors import fewest_survivors

WITHOUT = """
import sys
sys.modules["cryptography"] = None  # as where the package is not installed
import raylt.core.experiment
"""


@pytest.mark.parametrize(("members", "needed"), [(1, 2), (2, 2), (3, 2), (4, 3), (10, 7)])
def test_two_thirds_of_the_members_must_survive(members, needed):
    assert fewest_survivors(members) == needed


@pytest.mark.slow
def test_the_experiment_module_imports_no_cryptography():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
