"""The findings of `raylt doctor`. Takes 1 s, and 15 s with a Ray session (slow)."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from actors.cluster.doctor import MIN_VERSIONS, differences, examine, outdated


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (
            {"pillow": "12.1.0"},
            [
                "pillow 12.1.0 is older than 12.1.1, below which vulnerabilities are known: "
                "pip install -U 'pillow>=12.1.1'"
            ],
        ),
        ({"pillow": "12.1.1", "torch": "2.10.0+cu128", "ray": "2.100.1"}, []),
        (dict(MIN_VERSIONS), []),
    ],
)
def test_what_is_below_its_floor_is_named_with_the_remedy(installed, found):
    assert outdated(installed.get) == found


def test_everything_has_a_floor_that_can_be_undercut():
    assert len(outdated(lambda name: "0.0.1")) == len(MIN_VERSIONS)


def test_an_installation_of_today_is_above_the_floors():
    """Versions that `pip install` accepts for raylt must not be reported by its doctor."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lower = {
        need.name: max(Version(part.version) for part in need.specifier if part.operator == ">=")
        for need in map(Requirement, project["dependencies"])
    }
    assert [name for name in MIN_VERSIONS if name in lower and lower[name] < Version(MIN_VERSIONS[name])] == []


def test_a_node_with_other_versions_is_named():
    local = {"python": "3.11.7", "torch": "2.15.0"}
    nodes = {"10.0.0.1": local, "10.0.0.2": {"python": "3.11.7", "torch": "2.14.1"}, "10.0.0.3": "did not answer"}
    assert differences(local, nodes) == [
        "node 10.0.0.2: torch 2.14.1 instead of 2.15.0; install the same versions on all nodes and here",
        "node 10.0.0.3: did not answer",
    ]


@pytest.mark.slow
def test_a_session_without_a_token_and_a_token_file_that_others_can_read_are_problems(
    ray_session, tmp_path, monkeypatch
):
    file = tmp_path / "token"
    file.write_text("right" * 8)
    file.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    findings = examine(None)
    exposed, unauthenticated = findings["problems"]
    assert str(file) in exposed
    assert "mode 640" in exposed
    assert f"chmod 600 {file}" in exposed
    assert "RAY_AUTH_MODE=token" in unauthenticated
    assert (findings["nodes"], findings["CPUs (Ray)"], findings["authentication"]) == (1, 4, "off")
