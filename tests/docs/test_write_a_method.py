"""docs/write-a-method.md: the blocks before "Bring it in" are the file my_method.py, and the blocks after it use it."""

from pathlib import Path

import pytest
import tiny
from test_docs import blocks

from raylt.contract.case import Case
from raylt.contract.checks import CHECKS, fault_of
from raylt.registry import TABLES, load_plugin

PAGE = Path(__file__).parents[2] / "docs" / "write-a-method.md"
NAMES = (
    "mine",
    "mine_means",
    "mine_memory",
    "mine_own",
    "mine_tuned",
    "mine_tuned_for_all",
    "mine_nearest",
    "mine_momentum",
)


def sources() -> tuple[str, str]:
    """Return the sources before and after the heading, with the line numbers of the page."""
    lines, end = blocks(PAGE).split("\n"), PAGE.read_text().splitlines().index("## Bring it in")
    return "\n".join([*lines[:end], ""]), "\n" * end + "\n".join(lines[end:])


@pytest.fixture
def my_method(tmp_path, monkeypatch):
    """Write the page's file; unregister its methods after the test."""
    for table in TABLES.values():
        for name in NAMES:
            monkeypatch.setitem(table, name, None)
            monkeypatch.delitem(table, name)
    file = tmp_path / "my_method.py"
    file.write_text(sources()[0])
    return file


@pytest.mark.slow
def test_the_file_brings_the_methods_of_the_page_and_each_does_what_it_says(my_method, tiny_task, tmp_path):
    made = {plugin.name: plugin.value() for plugin in load_plugin(my_method)}
    assert list(made) == list(NAMES)
    ended = {}
    for name, method in made.items():
        experiment = tiny.make_experiment(tiny.configure(), tiny_task, tmp_path, method)
        reports = []
        while not experiment.done:
            reports.append(experiment.step())
        ended[name] = experiment, reports
    server, reports = ended["mine_means"][0].server, ended["mine_means"][1]
    assert reports[0].figures["classes"] == server.state["present"].sum() == 4
    assert all("weights" in state["state"] for _, state in ended["mine_memory"][0].fleet.private_states([0, 1, 2]))
    assert all(
        name.startswith("classifier.")
        for _, state in ended["mine_own"][0].fleet.private_states([0])
        for name in state["model"]
    )
    assert [report.phase for report in ended["mine_nearest"][1]] == ["round", "round", "finish"]
    assert "server_optimiser" in ended["mine_momentum"][0].server.state


@pytest.mark.slow
def test_each_keeps_the_contract(my_method, tmp_path):
    faults = {}
    for plugin in load_plugin(my_method):
        folder = tmp_path / plugin.name
        folder.mkdir()
        case = Case(plugin.value(), "classification", folder)
        faults |= {(plugin.name, check.__name__): fault_of(check, case) for check in CHECKS}
    assert {what: fault for what, fault in faults.items() if fault} == {}
    assert len(faults) == len(NAMES) * len(CHECKS)


@pytest.mark.slow
def test_the_methods_are_run_as_values(my_method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(sources()[1], str(PAGE), "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.endswith("done\n")
