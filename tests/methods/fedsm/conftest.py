"""Runs that several tests in this folder share."""

import pytest
import teachers


@pytest.fixture(scope="module")
def npz(tiny_task, tmp_path_factory) -> str:
    """Save a feature file for the tiny task; return the teacher's name."""
    return teachers.save_features(tmp_path_factory.mktemp("features") / "f.npz", tiny_task)
