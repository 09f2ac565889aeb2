"""Runs that several tests in this folder share."""

import pytest
from mupfl_runs import run


@pytest.fixture(scope="module")
def finished(tiny_task, tmp_path_factory):
    return run(tiny_task, tmp_path_factory.mktemp("mupfl"))
