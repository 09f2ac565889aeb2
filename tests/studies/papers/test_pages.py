"""Pages and tables of the recorded studies."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from raylt.studies.papers.verdict_page import page, verdict_tables
from raylt.studies.papers.verdicts import verdicts
from raylt.studies.report.comparison_tables import comparison_table, measures_table
from raylt.studies.study import Study

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "studies" / "results").glob("*.json"))


def test_the_claims_of_the_digits_study_hold():
    compared = Study.open(ROOT / "studies" / "results" / "digits.json").compare()
    assert {(each.verdict, each.p is not None and each.p < 0.001) for each in compared.claims} == {("holds", True)}


def test_studies_page_has_the_figures_of_the_digits_study():
    compared = Study.open(ROOT / "studies" / "results" / "digits.json").compare()
    table = comparison_table(compared).markdown()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| IF")]
    text = (ROOT / "docs" / "studies.md").read_text()
    assert len(rows) >= 6
    for cell, arm, seeds, mean, _, difference, optimism, _ in rows[:6]:
        assert " | ".join([cell, arm, seeds, mean, difference, optimism]) + " |" in text


@pytest.mark.slow
def test_the_page_of_recorded_runs_has_a_row_for_each_cell_with_runs():
    records = [record for file in RESULTS for record in Study.open(file).records]
    judged = verdicts(records, mix_versions=True)
    rows = [line.split(" | ") for line in page(judged).splitlines() if "seeds) |" in line]
    assert sorted((row[2], row[5].split(" ")[0]) for row in rows) == sorted(
        (verdict.cell.arm, f"{100 * verdict.ours.estimate:.2f}") for verdict in judged if verdict.ours is not None
    )


@pytest.mark.slow
def test_recorded_runs_are_whole_and_say_what_made_them():
    for file in RESULTS:
        for record in Study.open(file).records:
            assert record.state == "done" or record.diverged
            assert re.fullmatch(r"[0-9a-f]{64}", record.made["code"])
            assert record.made["commit"]


def printed(renderable, width):
    text = io.StringIO()
    Console(width=width, file=text).print(renderable)
    return text.getvalue()


@pytest.mark.slow
def test_verdicts_stand_at_eighty_columns_uncut():
    records = [record for file in RESULTS for record in Study.open(file).records]
    judged = [verdict for verdict in verdicts(records) if verdict.ours is not None]
    text = printed(verdict_tables(judged), 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for verdict in judged:
        assert f"{100 * verdict.ours.estimate:.2f} ± " in text
        assert all(word in text for word in verdict.cell.arm.split())


def test_wide_comparisons_are_printed_in_parts_that_repeat_the_arms():
    study = Study.open(ROOT / "studies" / "results" / "camvid.json")
    sheet = measures_table(
        [
            study.compare(measure)
            for measure in ("global_miou", "global_macro", "global_accuracy", "many", "medium", "few")
        ]
    )
    narrow, wide = printed(sheet.screen(), 80), printed(sheet.screen(), 300)
    assert "…" not in narrow
    assert [text.count("mupfl ") for text in (narrow, wide)] == [2, 1]
    for cell in (*sheet.head, *(cell for row in sheet.rows for cell in row)):
        assert cell in narrow
        assert cell in wide
