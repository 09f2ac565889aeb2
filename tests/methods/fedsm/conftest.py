"""Runs that several tests of this folder look at."""

import pytest
import teachers


@pytest.fixture(scope="module")
def npz(tiny_task, tmp_path_factory) -> str:
    """A feature file for the tiny task."""
    return teachers.save_features(tmp_path_factory.mktemp("features") / "f.npz", tiny_task)
