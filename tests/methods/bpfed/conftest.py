"""Runs that several tests of this folder look at."""

import pytest
from bpfed_runs import run


@pytest.fixture(scope="module")
def finished(tiny_task, tmp_path_factory):
    return run(tiny_task, tmp_path_factory.mktemp("bpfed"))
