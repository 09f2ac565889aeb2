"""docs/methods.md against what it is written from."""

import re
from pathlib import Path

import pytest

from raylt.cli.method_page import GROUPS, PAGE_MODEL, entries, group, markdown, year
from raylt.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "methods.md").read_text()
# lines whose figures are measured
MEASURED = re.compile(r"^(\| \[`|- (join|round|finish), )")
OURS = {name: method for name, method in METHODS.items() if method.__module__.startswith("raylt.")}


def unmeasured(page: str) -> list[str]:
    return [line for line in page.splitlines() if not MEASURED.match(line)]


def test_page_is_what_is_written_now_but_for_what_is_measured():
    """`raylt methods --page docs/methods.md` writes it."""
    written = markdown(entries(OURS, None, "8x8x3", 10), ROOT / "tests")
    assert unmeasured(PAGE) == unmeasured(written)


def test_page_has_a_measured_line_for_every_method():
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.+) \| (.+) \| (.+) \| (.+) \| (.*) \|$", PAGE, re.M)
    assert sorted(name for name, *_ in rows) == sorted(OURS)
    assert all(re.fullmatch(r"[\d.]+ (B|KiB|MiB)", up) for _, _, up, *_ in rows)


@pytest.mark.slow
def test_page_has_what_is_measured_now():
    assert markdown(entries(OURS, PAGE_MODEL, "8x8x3", 10), ROOT / "tests") == PAGE


def test_every_method_has_a_group_and_most_a_year():
    for name, method in OURS.items():
        assert group(method) in GROUPS
        assert (group(method) == "personal") == method.personal, name
    assert [year(METHODS[name]) for name in ("fedavg", "fedsm", "local")] == [2017, 2026, None]
