import re
from html.parser import HTMLParser

import pytest
from made import record

from raylt.errors import ConfigError
from raylt.studies import drawings
from raylt.studies.definition import define
from raylt.studies.report import render, write_report
from raylt.studies.results import write_results
from raylt.studies.study import Study

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Tags that are opened and not closed in order, and what is loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.faults, self.loaded = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loaded += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")
                        or (value and "url(" in value)]
        self.loaded += [tag] if tag in ("script", "link", "iframe", "object", "embed") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def study(arms=("fedavg", "sfd <b>&"), cells=("IF 10", "IF 50"), seeds=6, **more):
    definition = define({"name": "s", "about": "<script>alert(1)</script>", "arms": {
        "fedavg": "fedavg", "sfd": "sfd"}, "claims": ["sfd > fedavg"]}).model_copy(update={"claims": []})
    records = [record(arm, seed, 0.5 + 0.01 * seed + 0.1 * place, cell=cell, by_client={"matched": [0.5, None, 0.9]},
                      **more) for cell in cells for seed in range(seeds) for place, arm in enumerate(arms)]
    for each in records:
        each.config["method"] = {"name": "fedavg"}
    held = {cell: {"names": ["a", "b"], "groups": ["many", "few"], "counts": [[5, 0], [2, 1]]} for cell in cells}
    return Study(definition, None, records, held)


def test_a_report_is_sound_and_loads_nothing():
    text = render(study())
    page = Page(text)
    assert (page.faults, page.open, page.loaded) == ([], [], [])
    assert "@import" not in text
    assert "url(" not in text
    assert not re.search(r"https?://", text)


def test_what_people_write_is_escaped():
    text = render(study())
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text
    assert "<b>&" not in text


def test_it_has_every_part_and_a_title_under_the_mouse():
    text = render(study())
    for part in ("Arms", "Over all cells", "Learning curves", "Groups of classes and clients", "Traffic and time",
                 "How it was made", "prefers-color-scheme: dark", "@media print", "client 1, class a: 2"):
        assert part in text
    assert text.count("<title>") > 100


def test_runs_that_are_not_done_are_named_and_no_figures_of_them_are_drawn():
    whole = study()
    broken = record("fedavg", 9, 0.123456, cell="IF 10", state="damaged", problem="line 3 is not JSON")
    text = render(Study(whole.definition, None, [*whole.records, broken], whole.holdings))
    assert "IF 10/fedavg/seed-9: damaged: line 3 is not JSON" in text
    assert "12.35" not in text


def test_a_large_study_stays_under_the_limit():
    long = {"curve": {key: [round(0.001 * (step % 700), 4) for step in range(500)] for key in (
        "accuracy", "many", "medium", "few")} | {"step": list(range(1, 501)), "up": [1] * 500, "down": [1] * 500,
                                                 "seconds": [1.0] * 500}, "planned_steps": 500}
    text = render(study(arms=[f"arm {n}" for n in range(6)] + ["fedavg"], cells=[f"IF {n}" for n in range(8)], seeds=3,
                        **long))
    assert len(text.encode()) < 2 * 2**20       # a file that a mail takes


def test_a_study_of_many_arms_clients_and_classes_too():
    many = study(arms=[f"arm {n}" for n in range(11)] + ["fedavg"], cells=[f"IF {n}" for n in range(10)], seeds=1)
    whole = {"names": [f"class {c}" for c in range(1000)], "groups": ["many"] * 1000,
             "counts": [[1 + (k + c) % 7 for c in range(1000)] for k in range(300)]}
    for each in many.records:
        each.by_client["matched"] = [k / 300 for k in range(300)]
    held = {each.cell: whole for each in many.records}
    text = render(Study(many.definition, None, many.records, held))
    assert len(text.encode()) < 2 * 2**20
    assert "classes 0 to 99 together: " in text


def test_nothing_finished_is_refused_and_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="no run is finished"):
        render(study(state="stopped", summary=None))
    with pytest.raises(ConfigError, match="--to"):
        write_report(study(), tmp_path / "none" / "report.html")


def test_one_run_alone_has_a_report():
    one = study(arms=("fedavg",), cells=("",), seeds=1)
    assert "fedavg" in render(one)


def test_seconds_are_drawn_as_seconds_and_have_a_standard_deviation():
    one = study(cells=("IF 10",), seeds=2)
    for each in one.records:
        each.summary["seconds"] = 20.0 + 4 * each.seed
    text = render(Study(one.definition.model_copy(update={"measure": "seconds"}), None, one.records, one.holdings))
    assert "fedavg: 22.00 s" in text
    assert "2200.00" not in text
    assert '<td class="n">22 ± 25</td>\n<td class="n">3</td>' in text        # sd sqrt(8), 12.71 * sqrt(8 / 2)


def test_thinned_keeps_both_ends():
    assert drawings.thinned(5, 10) == [0, 1, 2, 3, 4]
    kept = drawings.thinned(500, 80)
    assert (kept[0], kept[-1], len(kept)) == (0, 499, 80)


def test_axes_have_round_numbers():
    assert drawings._even(28.1, 94.2) == [40, 60, 80]
    assert drawings._even(0.912, 0.934) == [0.915, 0.92, 0.925, 0.93]


def test_a_ninth_arm_has_the_first_ones_colour_and_another_dash():
    text = render(study(arms=["fedavg", *(f"arm {n}" for n in range(8))], cells=("IF 10",)))
    assert '<li class="c0">fedavg</li>' in text
    assert '<li class="c0 d1">arm 7</li>' in text
    drawn = re.findall(r'<polyline class="line ([^"]+)"', text)
    assert len(set(drawn)) == 9
    assert all(f".line.d{dash} {{" in text and f".key li.d{dash}::before" in text for dash in range(1, drawings.DASHES))
    assert [drawings.looks(place) for place in (7, 16, 31, 32)] == ["c7", "c0 d2", "c7 d3", "c0"]


def test_rounds_off_a_record_are_whole_numbers(tmp_path):
    made = study(arms=("fedavg",), cells=("IF 10",))
    write_results(tmp_path / "kept.json", made.definition, made.records, made.holdings, {})
    text = render(Study.open(tmp_path / "kept.json"))
    assert 'text-anchor="end">round 10</text>' in text
    assert "fedavg, round 2: " in text


def test_runs_that_were_judged_once_have_no_curves_and_one_beside_others_is_a_diamond():
    def curve(*accuracies):
        return {"step": list(range(1, 1 + len(accuracies))),
                **{key: list(accuracies) for key in ("accuracy", "many", "medium", "few")},
                **{key: [1.0] * len(accuracies) for key in ("seconds", "up", "down")}}

    once = render(study(curve=curve(None, None, 0.5)))
    assert "None: runs were judged once, at their end" in once
    assert "<polyline" not in once
    whole = study(arms=("fedavg",), cells=("IF 10",), curve=curve(0.1, 0.2, 0.5))
    last = study(arms=("sfd",), cells=("IF 10",), curve=curve(None, None, 0.5))
    both = render(Study(whole.definition, None, whole.records + last.records, whole.holdings))
    assert "or the only step that was judged" in both
    assert "sfd, at the end: 50.0" in both
    assert "fedavg, at the end" not in both


def test_best_less_last_is_a_column_where_it_is_known():
    several, added = study(), "what choosing the best round on the test set would have added"
    assert added in render(several)
    own = several.definition.model_copy(update={"measure": "matched"})
    assert added not in render(Study(own, None, several.records, several.holdings))
