"""Names that would run or break a page: no report, table or picture has them as anything but text."""

import re
from html.parser import HTMLParser
from xml.dom import minidom

import pytest
from made import record

from raylt.runs.callbacks.console import UNSAFE
from raylt.studies.analysis.ranking import rank
from raylt.studies.definition import define
from raylt.studies.report.comparison_tables import comparison_table
from raylt.studies.report.html import render
from raylt.studies.report.leaderboard import ranking_svg, ranking_table
from raylt.studies.report.text_table import TextTable
from raylt.studies.study import Study

NAMES = {
    "script": "<script>alert(1)</script>",
    "end of style": "</style></title><img src=x onerror=alert(1)>",
    "double quote": '" onload="alert(1)',
    "single quote": "' onmouseover='alert(1)",
    "link": "[x](javascript:alert(1))",
    "autolink": "<javascript:alert(1)>",
    "comment": "<!-- end of raylt compare -->",
    "right to left": "\u202etxt.exe\u200f",
    "escape": "\x1b[2J\x00\x9b",
    "surrogate": "\ud800",
    "pipe": "a|b",
    "line break": "a\nb",
    "another line break": "a\u2028b\rc",
    "TeX": "%\n\\write18{touch x}\n\\input{y}",
    "template": "{{ 7*7 }}{% raw %}",
    "long": "x" * 3000,
}
PLACES = ("arm", "cell", "about", "study", "class", "made", "problem", "folder")


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))


def study_with(name, place):
    """Return a made study of two arms, with a name in one of the places."""
    cell = name if place == "cell" else "IF 10"
    arms = ["fedavg", name if place == "arm" else "sfd"]
    records = [
        record(arm, seed, 0.5 + 0.01 * seed + 0.1 * number, cell=cell, by_client={"matched": [0.5, None, 0.9]})
        for seed in range(2)
        for number, arm in enumerate(arms)
    ]
    if place == "problem":
        records.append(record("gone", 0, 0.1, cell=cell, state="failed", problem=name, summary=None))
    for each in records:
        each.config["method"] = {"name": "fedavg"}
        if place == "made":
            each.made.update(cpu=name, date=name)
        if place == "folder":
            object.__setattr__(each, "folder", name)
    definition = define({"name": "s", "arms": {"fedavg": "fedavg", "sfd": "sfd"}})
    if place in ("about", "study"):
        definition = definition.model_copy(update={{"about": "about", "study": "name"}[place]: name})
    names = [name if place == "class" else "a", "b"]
    held = {cell: {"names": names, "groups": ["many", "few"], "counts": [[5, 0], [2, 1]]}}
    return Study(definition, None, records, held)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_more_than_text_in_a_report(name):
    plain = [tag for tag, _ in Tags(render(study_with("x", "arm"), True)).found]
    for place in PLACES:
        text = render(study_with(NAMES[name], place), True)
        tags = Tags(text).found
        assert not UNSAFE.search(text)
        assert {tag for tag, _ in tags} <= {*plain, "li"}
        assert not [key for _, attributes in tags for key, _ in attributes if key.startswith("on") or key == "href"]
        text.encode()


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_more_than_text_in_a_table(name):
    for place in ("arm", "cell", "study", "problem"):
        study = study_with(NAMES[name], place)
        ranking = rank({study.definition.name: study.records}, "accuracy", "last", 0.95)
        for table in (comparison_table(study.compare(mix_versions=True)), ranking_table(ranking)):
            check_markdown(table)
            check_latex(table)
            assert "<script" not in table.html()
            assert not UNSAFE.search(table.html())
        minidom.parseString(ranking_svg(ranking).encode())


def check_markdown(table: TextTable) -> None:
    text = table.markdown()
    for line in text.splitlines():
        assert line == "" or line.startswith(("|", "**", "- ")) or line.endswith(":"), line
    assert not re.search(r"<[a-z/!]|(?<!\\)\]\(", text)
    assert not UNSAFE.search(text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows[: 2 + len(table.rows)]} == {len(table.head) + 1}


def check_latex(table: TextTable) -> None:
    for line in table.latex().splitlines():
        assert line.startswith(("%", r"\usepackage", r"\begin", r"\end", r"\toprule", r"\mid", r"\bottom")) or (
            line.endswith(r"\\") and not re.search(r"\\(write|input)", line)
        ), line
    assert not UNSAFE.search(table.latex())


def test_signs_that_do_no_harm_stay():
    table = TextTable("p < 0.05", ["a > b"], [["+1.29 [+1.20, +1.40]"], ["feddecorr_2"]], "l")
    assert table.markdown() == "**p < 0.05**\n\n| a > b |\n|---|\n| +1.29 [+1.20, +1.40] |\n| feddecorr_2 |\n"
