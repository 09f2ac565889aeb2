"""A run without secure sums does not need the library for masks."""

import subprocess
import sys

import pytest

from raylt.core.protection.survivors import fewest_survivors

WITHOUT = """
import sys
sys.modules["cryptography"] = None  # as where the package is not installed
import raylt.core.experiment
"""


@pytest.mark.parametrize(("members", "needed"), [(2, 2), (3, 2), (4, 3), (10, 7)])
def test_two_thirds_of_the_members_must_survive(members, needed):
    assert fewest_survivors(members) == needed


def test_an_experiment_needs_no_cryptography():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
