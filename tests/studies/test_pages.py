"""What pages say of recorded studies is what the records say."""

import re
from pathlib import Path

from raylt.studies import tables
from raylt.studies.page import page
from raylt.studies.records import Record
from raylt.studies.study import Study
from raylt.studies.verdicts import verdicts

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "studies" / "results").glob("*.json"))


def test_reproducibility_page_is_that_of_the_recorded_runs():
    records: list[Record] = [record for file in RESULTS for record in Study.open(file).records]
    assert (ROOT / "docs" / "reproducibility.md").read_text() == page(verdicts(records)), (
        "raylt verdicts studies/results/*.json --page docs/reproducibility.md writes it anew")


def test_readme_has_the_figures_of_the_recorded_study():
    compared = Study.open(ROOT / "studies" / "results" / "digits.json").compare()
    table = tables.of_comparison(compared).markdown()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| IF")]
    readme = (ROOT / "README.md").read_text()
    for cell, arm, seeds, mean, _, difference, optimism, _ in rows[:6]:
        assert " | ".join([cell, arm, seeds, mean, difference, optimism]) + " |" in readme
    assert {(each.verdict, each.p is not None and each.p < 0.001) for each in compared.claims} == {("holds", True)}


def test_recorded_runs_are_whole_and_say_what_made_them():
    for file in RESULTS:
        for record in Study.open(file).records:
            assert record.state == "done"
            assert re.fullmatch(r"[0-9a-f]{64}", record.made["code"])
            assert record.made["commit"]
