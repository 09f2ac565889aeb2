"""`raylt page`: tables of a page are written by the commands above them."""

from pathlib import Path

import pytest

from raylt.cli.page import filled
from raylt.errors import ConfigError
from raylt.studies.study import Study
from raylt.studies.tables import of_comparison, of_measures

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "studies" / "results" / "digits.json"
PAGE = "Before.\n\n<!-- raylt compare {} -->\nold\n<!-- end of raylt compare -->\n\nAfter.\n"


def test_a_table_is_written_between_its_comments_and_nothing_else_changes():
    text = PAGE.format(DIGITS)
    written = filled(text)
    table = of_comparison(Study.open(DIGITS).compare()).markdown()
    assert written == text.replace("old\n", f"\n{table}\n")
    assert filled(written) == written
    # a page with the line ends of Windows
    assert "IF 50" in filled(text.replace("\n", "\r\n"))


def test_measures_side_by_side_are_ordered_by_the_first():
    study = Study.open(DIGITS)
    sheet = of_measures([study.compare("few"), study.compare("bytes_up")])
    assert sheet.head == ["cell", "arm", "seeds", "few, %", "bytes_up, MiB"]
    assert [row[:3] for row in sheet.rows] == [[cell, arm, "6"] for cell in ("IF 10", "IF 50")
                                               for arm in ("sfd", "fedavg", "sfd without aligner")]
    assert sheet.rows[0][3].startswith(of_comparison(study.compare("few")).rows[1][3])
    fewest = of_measures([study.compare("bytes_up"), study.compare("few")])
    assert fewest.rows[0][1] == "fedavg"                     # fewer bytes are better
    assert sheet.markdown() in filled(PAGE.format(f"{DIGITS} --measure few --measure bytes_up"))
    with pytest.raises(ConfigError, match="measure few: it is given twice"):
        of_measures([study.compare("few"), study.compare("few")])


@pytest.mark.parametrize(("text", "problem"), [
    ("no table", "no comment of the form"),
    ("<!-- raylt compare a.json -->\n", "1 comments start a table and 0 end one"),
    ("<!-- end of raylt compare -->\n<!-- raylt compare a.json -->\n", "in this order"),
    ("<!-- raylt compare a -->\n<!-- raylt compare b -->\n" + 2 * "<!-- end of raylt compare -->\n", "in this order"),
    (PAGE.format("'a.json"), r"<!-- raylt compare 'a\.json -->: No closing quotation; close the quotation"),
])
def test_a_page_that_cannot_be_filled_is_one_line(text, problem):
    with pytest.raises(ConfigError, match=problem):
        filled(text)


def test_command_writes_the_file_once(tmp_path, raylt):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(DIGITS))
    code, out, _ = raylt("page", page)
    assert code == 0
    assert "1 tables, written anew" in out.replace("\n", " ")
    before = page.read_text()
    code, out, _ = raylt("page", page)
    assert "all as they were" in out.replace("\n", " ")
    assert page.read_text() == before
    page.write_text(PAGE.format(f"{tmp_path}/none.json"))
    code, _, err = raylt("page", page)
    assert (code, "none.json" in err) == (2, True)
    for missing in (tmp_path, tmp_path / "gone.md"):
        assert raylt("page", missing).err == f"error: {missing}: no such file; give a Markdown page\n"
    page.write_bytes(b"\xff\xfe<")
    assert raylt("page", page)[0] == 2


def test_of_several_pages_none_is_written_where_one_cannot_be(raylt, tmp_path):
    first, second, content = tmp_path / "first.md", tmp_path / "second.md", PAGE.format(DIGITS)
    first.write_text(content)
    for broken in (None, "no table"):
        if broken:
            second.write_text(broken)
        code, _, err = raylt("page", first, second)
        assert (code, "second.md: no" in err) == (2, True)
        assert first.read_text() == content
    second.write_text(content)
    code, out, _ = raylt("page", first, second)
    assert (code, out.count("1 tables, written anew")) == (0, 2)
    assert first.read_text() == second.read_text() != content


PAGES_OF_RESULTS = ["results.md", *sorted(f"results/{path.name}" for path in (ROOT / "docs/results").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES_OF_RESULTS)
def test_page_of_results_is_that_of_the_recorded_studies(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / page).read_text()
    assert filled(text) == text, "raylt page docs/results.md docs/results/*.md writes it anew"
