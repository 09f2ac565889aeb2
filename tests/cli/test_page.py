"""The command `raylt page`: the commands in a page's comments fill the tables below them."""

import re
from pathlib import Path

import pytest
from refusals import refused

from raylt.cli.main import ClickException
from raylt.cli.studies.compare import open_any
from raylt.cli.studies.page import filled
from raylt.cli.studies.page import page as write_page
from raylt.errors import CheckpointError, ConfigError
from raylt.studies.report.comparison_tables import comparison_table, measures_table
from raylt.studies.study import Study

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "studies" / "results" / "digits.json"
BLOCKS = re.compile(r"<!-- raylt compare (.*?) -->\n(.*?)<!-- end of raylt compare -->", re.DOTALL)
PAGE = "Before.\n\n<!-- raylt compare {} -->\nold\n<!-- end of raylt compare -->\n\nAfter.\n"


def test_a_table_is_written_between_its_comments_and_nothing_else_changes():
    text = PAGE.format(DIGITS)
    written = filled(text)
    table = comparison_table(Study.open(DIGITS).compare()).markdown()
    assert written == text.replace("old\n", f"\n{table}\n")
    assert filled(written) == written
    # a page with the line ends of Windows
    assert "IF 50" in filled(text.replace("\n", "\r\n"))


def test_an_error_of_a_comparison_names_the_page_and_the_comment():
    with refused("file.not-found", CheckpointError) as caught:
        filled(PAGE.format("absent.json --measure few"), "results.md")
    assert str(caught.value).startswith("results.md, raylt compare absent.json --measure few: ")


@pytest.mark.parametrize("words", ["--help", "--help {}", "{} --help", "{} --format json --help"])
def test_a_help_text_replaces_no_table(words):
    with pytest.raises((ConfigError, ClickException)):
        filled(PAGE.format(words.format(DIGITS)))


def test_measures_side_by_side_are_ordered_by_the_first():
    study = Study.open(DIGITS)
    sheet = measures_table([study.compare("few"), study.compare("bytes_up")])
    assert sheet.head == ["cell", "arm", "seeds", "few, %", "bytes_up, MiB"]
    assert [row[:3] for row in sheet.rows] == [
        [cell, arm, "6"] for cell in ("IF 10", "IF 50") for arm in ("sfd", "fedavg", "sfd without aligner")
    ]
    assert sheet.rows[0][3].startswith(comparison_table(study.compare("few")).rows[1][3])
    fewest = measures_table([study.compare("bytes_up"), study.compare("few")])
    assert fewest.rows[0][1] == "fedavg"  # fewer bytes are better
    assert sheet.markdown() in filled(PAGE.format(f"{DIGITS} --measure few --measure bytes_up"))
    with refused("config.conflict", ConfigError, key="measure", name="few"):
        measures_table([study.compare("few"), study.compare("few")])


@pytest.mark.parametrize(
    ("text", "details"),
    [
        ("no table", {"starts": 0, "ends": 0}),
        ("<!-- raylt compare a.json -->\n", {"starts": 1, "ends": 0}),
        ("<!-- end of raylt compare -->\n<!-- raylt compare a.json -->\n", {"starts": 1, "ends": 1}),
        (
            "<!-- raylt compare a -->\n<!-- raylt compare b -->\n" + 2 * "<!-- end of raylt compare -->\n",
            {"starts": 2, "ends": 2},
        ),
        (PAGE.format("'a.json"), {"value": "'a.json"}),
    ],
)
def test_a_page_that_cannot_be_filled_is_refused(text, details):
    with refused("file.malformed", ConfigError, **details):
        filled(text)


def test_command_writes_the_file_once(tmp_path, raylt):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(DIGITS))
    code, out, _ = raylt("page", page)
    assert code == 0
    assert "1 table, updated" in out.replace("\n", " ")
    before = page.read_text()
    code, out, _ = raylt("page", page)
    assert "unchanged" in out
    assert page.read_text() == before
    page.write_text(PAGE.format(f"{tmp_path}/none.json"))
    code, _, err = raylt("page", page)
    assert (code, "none.json" in err) == (2, True)
    for missing in (tmp_path, tmp_path / "gone.md"):
        with refused("file.not-found", ConfigError, path=str(missing)):
            write_page([missing])
    page.write_bytes(b"\xff\xfe<")
    assert raylt("page", page)[0] == 2


def test_of_several_pages_none_is_written_where_one_cannot_be(raylt, tmp_path):
    first, second, content = tmp_path / "first.md", tmp_path / "second.md", PAGE.format(DIGITS)
    first.write_text(content)
    for broken in (None, "no table"):
        if broken:
            second.write_text(broken)
        code, _, err = raylt("page", first, second)
        assert (code, "second.md" in err) == (2, True)
        assert first.read_text() == content
    second.write_text(content)
    code, out, _ = raylt("page", first, second)
    assert (code, out.count("1 table, updated")) == (0, 2)
    assert first.read_text() == second.read_text() != content


@pytest.mark.slow
def test_results_are_opened_once_for_all_tables_of_a_command_and_again_for_the_next(raylt, tmp_path, monkeypatch):
    pages = [tmp_path / "first.md", tmp_path / "second.md"]
    for file in pages:
        file.write_text(2 * PAGE.format(DIGITS))
    opened = []
    monkeypatch.setattr(Study, "open", lambda path, read=Study.open: opened.append(path) or read(path))
    for times in (1, 2):
        assert raylt("page", *pages).code == 0
        assert opened == [DIGITS] * times
    open_any([DIGITS])
    open_any([DIGITS])  # outside the command
    assert opened == [DIGITS] * 4


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(f"results/{p.name}" for p in (ROOT / "docs/results").glob("*.md")))
def test_a_copy_of_a_page_of_results_can_be_updated_and_has_the_recorded_means(page, tmp_path, monkeypatch, raylt):
    monkeypatch.chdir(ROOT)
    copy = tmp_path / "page.md"
    copy.write_text((ROOT / "docs" / page).read_text())
    assert raylt("page", copy)[0] == 0
    for arguments, table in BLOCKS.findall(copy.read_text()):
        words = arguments.split()
        if "--claims" in words or "--measure" in words:
            continue
        study = Study.open(ROOT / words[0])
        at = words[words.index("--at") + 1] if "--at" in words else None
        shown = comparison_table(study.compare(at=at, mix_versions="--mix-versions" in words))
        assert [row for row in shown.rows if f"| {' | '.join(row)} |" not in table] == []
