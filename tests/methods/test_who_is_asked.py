"""Each client function is asked of the clients that a table names: those of the round's cohort, or all.

A statistic over the cohort alone, where a paper pools all clients, changes results without failing any other check.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import QUICK

from raylt.contract.case import SOME, Case
from raylt.methods import METHODS

TABLE = yaml.safe_load(Path(__file__).with_name("asked.yaml").read_text())
ASKED, WITH_FIELDS = TABLE["defaults"], TABLE["fields"]

# the other methods, which ask only the cohort, run with the slow tests
QUICKLY = [name for name, calls in ASKED.items() if name == "mupfl" or any("all" in who for who in calls.values())]


def asked(name: str, folder: Path, **fields: Any) -> dict[str, str]:
    """Return "all" or "some" for each client function of a run in which two of six clients train in a round."""
    case = Case(METHODS[name](**QUICK.get(name, {}) | fields), METHODS[name].problems[0], folder)
    trace = case.run(case.config(SOME))
    clients = len(trace.experiment.fleet.ids)
    replies: dict[str, set[str]] = {}
    for report in trace.reports:
        for function, traffic in report.traffic.items():
            replies.setdefault(function, set()).add("all" if traffic["replies"] == clients else "some")
    return {function: " or ".join(sorted(kinds)) for function, kinds in sorted(replies.items())}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_clients_that_are_asked_are_those_of_the_table(name, tmp_path):
    assert asked(name, tmp_path) == ASKED[name]


@pytest.mark.parametrize(
    ("name", "fields", "calls"), [(each["name"], each["with"], each["asks"]) for each in WITH_FIELDS], ids=str
)
def test_fields_that_add_a_call_ask_those_of_the_table(name, fields, calls, tmp_path):
    assert asked(name, tmp_path, **fields) == calls


def test_the_table_has_every_method_and_no_other():
    assert ASKED.keys() == METHODS.keys()
