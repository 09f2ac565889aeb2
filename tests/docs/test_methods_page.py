"""The page of methods, written by `raylt methods --page`."""

import re

import pytest

from raylt.cli.method_page import GROUPS, entries, group, markdown, year
from raylt.hyper import range_of
from raylt.methods import METHODS

OURS = {name: method for name, method in METHODS.items() if method.__module__.startswith("raylt.")}


def test_page_has_a_section_with_every_field_of_every_method():
    page = markdown(entries(OURS, None, "8x8x3", 10))
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    assert sections.keys() == OURS.keys()
    for name, method in OURS.items():
        assert method.paper in sections[name]
        for field, info in method.model_fields.items():
            assert f"| `{field}` | {info.default} | {range_of(info)} |" in sections[name], (name, field)


@pytest.mark.slow
def test_page_has_the_measured_costs_of_a_method():
    page = markdown(entries({name: OURS[name] for name in ("fedavg", "fedncm")}, "small", "8x8x3", 10))
    assert re.search(
        r"^\| \[`fedavg`\]\(#fedavg\) \| model, loss \| [\d.]+ KiB \| [\d.]+ KiB \| 1 trained \| 1.0 \|  \|$",
        page,
        re.M,
    )
    assert re.search(r"^- finish, `statistics`: classes; [\d.]+ KiB up, [\d.]+ KiB down, passes: 1 read$", page, re.M)


def test_every_method_has_a_group_and_most_a_year():
    for name, method in OURS.items():
        assert group(method) in GROUPS
        assert (group(method) == "personal") == method.personal, name
    assert [year(METHODS[name]) for name in ("fedavg", "fedsm", "local")] == [2017, 2026, None]
