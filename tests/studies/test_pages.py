"""What pages say of recorded studies is what the records say."""

import io
import re
from pathlib import Path

from rich.console import Console

from raylt.studies import tables
from raylt.studies.page import page, table_of
from raylt.studies.records import Record
from raylt.studies.study import Study
from raylt.studies.tables import of_measures
from raylt.studies.verdicts import verdicts

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "studies" / "results").glob("*.json"))


def test_reproducibility_page_is_that_of_the_recorded_runs():
    records: list[Record] = [record for file in RESULTS for record in Study.open(file).records]
    assert (ROOT / "docs" / "reproducibility.md").read_text() == page(verdicts(records, mix_versions=True)), (
        "raylt verdicts studies/results/*.json --mix-versions --page docs/reproducibility.md writes it anew")


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


def printed(renderable, width):
    text = io.StringIO()
    Console(width=width, file=text).print(renderable)
    return text.getvalue()


def test_verdicts_stand_at_eighty_columns_uncut():
    records = [record for file in RESULTS for record in Study.open(file).records]
    judged = [verdict for verdict in verdicts(records) if verdict.ours is not None]
    text = printed(table_of(judged), 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for verdict in judged:
        assert f"{100 * verdict.ours.estimate:.2f} ± " in text
        assert verdict.cell.arm in text


def test_measures_that_do_not_fit_side_by_side_stand_below_each_other_with_the_arms_beside_each_part():
    study = Study.open(ROOT / "studies" / "results" / "camvid.json")
    sheet = of_measures([study.compare(measure) for measure in
                         ("global_miou", "global_macro", "global_accuracy", "many", "medium", "few")])
    narrow, wide = printed(sheet.screen(), 80), printed(sheet.screen(), 300)
    assert "…" not in narrow
    assert [text.count("mupfl ") for text in (narrow, wide)] == [2, 1]
    for cell in (*sheet.head, *(cell for row in sheet.rows for cell in row)):
        assert cell in narrow
        assert cell in wide
