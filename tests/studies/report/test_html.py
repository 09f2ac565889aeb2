import re
from dataclasses import replace
from html.parser import HTMLParser

from made import record
from refusals import refused

from raylt.errors import ConfigError
from raylt.studies.definition import define
from raylt.studies.records.recorded_runs import write_results
from raylt.studies.report import svg
from raylt.studies.report.html import render, write_report
from raylt.studies.study import Study

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Parses a page; records tags that are not closed in order, and loaded resources."""

    def __init__(self, text):
        super().__init__()
        self.open, self.faults, self.loaded = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loaded += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href", "xlink:href") or (value and "url(" in value)
        ]
        self.loaded += [tag] if tag in ("script", "link", "iframe", "object", "embed") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def study(arms=("fedavg", "sfd <b>&"), cells=("IF 10", "IF 50"), seeds=6, **more):
    definition = define(
        {
            "name": "s",
            "about": "<script>alert(1)</script>",
            "arms": {"fedavg": "fedavg", "sfd": "sfd"},
            "claims": ["sfd > fedavg"],
        }
    ).model_copy(update={"claims": []})
    records = [
        record(arm, seed, 0.5 + 0.01 * seed + 0.1 * place, cell=cell, by_client={"matched": [0.5, None, 0.9]}, **more)
        for cell in cells
        for seed in range(seeds)
        for place, arm in enumerate(arms)
    ]
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
    assert re.findall("<h2>(.+?)</h2>", text) == [
        "Arms",
        "Learning curves",
        "Groups of classes and clients",
        "Traffic and time",
        "Versions and machines",
    ]
    for part in ("<h3>Over cells</h3>", "prefers-color-scheme: dark", "@media print", "client 1, class a: 2"):
        assert part in text
    assert text.count("<title>") > 100


def test_runs_that_are_not_done_are_named_and_no_figures_of_them_are_drawn():
    whole = study()
    broken = record("fedavg", 9, 0.123456, cell="IF 10", state="damaged", problem="line 3 is not JSON")
    text = render(Study(whole.definition, None, [*whole.records, broken], whole.holdings))
    assert "IF 10/fedavg/seed-9: damaged: line 3 is not JSON" in text
    assert "12.35" not in text
    assert re.search(r"<td>fedavg</td><td class=\"n\">\d of \d</td>", text)
    failed = record("gone", 0, 0.1, cell="IF 10", state="failed", problem="why", summary=None)
    text = render(Study(whole.definition, None, [*whole.records, failed], whole.holdings))
    assert re.search(r"<td>gone</td><td class=\"n\">0 of \d</td><td class=\"n\">runs failed</td>", text)


def test_diverged_runs_are_named_and_count_as_guessing():
    whole = study()
    lost = record("gone", 0, 0.1, cell="IF 10", state="failed", problem="lr", error="training.diverged", summary=None)
    text = render(Study(whole.definition, None, [*whole.records, lost], whole.holdings))
    assert "<h3>Diverged, which counts as guessing a class" in text
    assert "IF 10/gone/seed-0: failed: lr" in text
    assert re.search(
        r"<td>gone</td><td class=\"n\">0 \+ 1 diverged of 6</td><td class=\"n\">50.00", text
    )  # of two classes
    assert "<h3>Diverged" not in render(whole)


def test_a_large_study_stays_under_the_limit():
    long = {
        "curve": {
            key: [round(0.001 * (step % 700), 4) for step in range(500)]
            for key in ("accuracy", "many", "medium", "few")
        }
        | {"step": list(range(1, 501)), "up": [1] * 500, "down": [1] * 500, "seconds": [1.0] * 500},
        "planned_steps": 500,
    }
    text = render(
        study(arms=[f"arm {n}" for n in range(6)] + ["fedavg"], cells=[f"IF {n}" for n in range(8)], seeds=3, **long)
    )
    assert len(text.encode()) < 2 * 2**20  # small enough for a mail


def test_a_study_of_many_arms_clients_and_classes_too():
    many = study(arms=[f"arm {n}" for n in range(11)] + ["fedavg"], cells=[f"IF {n}" for n in range(10)], seeds=1)
    whole = {
        "names": [f"class {c}" for c in range(1000)],
        "groups": ["many"] * 1000,
        "counts": [[1 + (k + c) % 7 for c in range(1000)] for k in range(300)],
    }
    for each in many.records:
        each.by_client["matched"] = [k / 300 for k in range(300)]
    held = {each.cell: whole for each in many.records}
    text = render(Study(many.definition, None, many.records, held))
    assert len(text.encode()) < 2 * 2**20
    assert "classes 0 to 99 together: " in text


def test_nothing_finished_is_refused_and_a_file_that_cannot_be_written(tmp_path):
    with refused("study.nothing-finished", ConfigError, name="s"):
        render(study(state="stopped", summary=None))
    with refused("file.unwritable", ConfigError, path=str(tmp_path / "none" / "report.html")):
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
    assert '<td class="n">22.0 ± 25.4</td>\n<td class="n">2.8</td>' in text  # sd sqrt(8), 12.71 * sqrt(8 / 2)


def test_thinned_keeps_both_ends():
    assert svg.thinned(5, 10) == [0, 1, 2, 3, 4]
    kept = svg.thinned(500, 80)
    assert (kept[0], kept[-1], len(kept)) == (0, 499, 80)


def test_axes_have_round_numbers():
    assert svg._even(28.1, 94.2) == [40, 60, 80]
    assert svg._even(0.912, 0.934) == [0.915, 0.92, 0.925, 0.93]


def test_arms_have_different_colours_and_dashes():
    text = render(study(arms=["fedavg", *(f"arm {n}" for n in range(8))], cells=("IF 10",)))
    assert '<li class="c0">fedavg</li>' in text
    assert '<li class="c0 d1">arm 7</li>' in text
    drawn = re.findall(r'<polyline class="line ([^"]+)"', text)
    assert len(set(drawn)) == 9
    assert all(f".line.d{dash} {{" in text and f".key li.d{dash}::before" in text for dash in range(1, svg.DASHES))
    assert [svg.looks(place) for place in (0, 1, 7, 16, 31, 32)] == ["c0", "c1 d1", "c7 d3", "c0 d2", "c7 d2", "c0"]
    assert len({svg.looks(place) for place in range(32)}) == 32


def test_rounds_off_a_record_are_whole_numbers(tmp_path):
    made = study(arms=("fedavg",), cells=("IF 10",))
    records = [replace(each, by_client={}) for each in made.records]
    write_results(tmp_path / "kept.json", made.definition, records, made.holdings, {})
    text = render(Study.open(tmp_path / "kept.json"))
    assert 'text-anchor="end">round 10</text>' in text
    assert "fedavg, round 2: " in text


def test_runs_that_were_judged_once_have_no_curves_and_one_beside_others_is_a_diamond():
    def curve(*accuracies):
        return {
            "step": list(range(1, 1 + len(accuracies))),
            **{key: list(accuracies) for key in ("accuracy", "many", "medium", "few")},
            **{key: [1.0] * len(accuracies) for key in ("seconds", "up", "down")},
        }

    once = render(study(curve=curve(None, None, 0.5)))
    assert "<polyline" not in once
    whole = study(arms=("fedavg",), cells=("IF 10",), curve=curve(0.1, 0.2, 0.5))
    last = study(arms=("sfd",), cells=("IF 10",), curve=curve(None, None, 0.5))
    both = render(Study(whole.definition, None, whole.records + last.records, whole.holdings))
    assert "sfd, after the last round: 50.0" in both
    assert "fedavg, after the last" not in both


def test_best_less_last_is_a_column_where_it_is_known():
    several, column = study(), '<th class="n">best \u2212 last</th>'
    assert column in render(several)
    own = several.definition.model_copy(update={"measure": "matched"})
    assert column not in render(Study(own, None, several.records, several.holdings))


def test_the_table_of_arms_says_whose_models_were_evaluated_and_in_one_round_only():
    made = study(arms=("fedavg", "ditto"), seeds=2)
    for number, run in enumerate(made.records):
        own = run.arm == "ditto"
        curve = run.curve | ({"accuracy": [None] * 9 + run.curve["accuracy"][9:]} if own else {})
        shown = {"figure": "matched" if own else "accuracy", "last": 0.5}
        made.records[number] = replace(run, summary=run.summary | {"shown": shown}, curve=curve)
    text = render(made)
    assert "<h3>Evaluated models</h3>\n<ul>\n<li>of ditto: clients&#39; own models" in text
    assert "<h3>One evaluated round</h3>\n<ul>\n<li>ditto: the last one" in text


def test_an_interval_is_drawn_only_over_values_that_a_share_can_have():
    wide = study(seeds=2)  # with two seeds a t interval is wider than all possible shares
    for each in wide.records:
        each.summary["accuracy"]["last"] = 0.05 if each.seed else 0.3
    text = render(wide)
    assert "interval 0.00 to 100.00" in text
    assert not re.search(r"interval -|to 1\d\d\.[1-9]", text)


def test_text_of_drawings_is_at_least_11_px_high_in_a_window_of_1200():
    style = render(study()).partition("</style>")[0]
    column = int(re.search(r"minmax\(min\((\d+)px", style)[1])
    width = 1200 - 2 * 20
    columns = (width + 14) // (column + 14)
    drawn = (width - 14 * (columns - 1)) / columns - 2 * 10  # without the padding of a figure
    size = min(int(px) for px in re.findall(r"svg text[^{]*{[^}]*?(\d+)px", style))
    assert size * drawn / svg.WIDTH >= 11


def test_class_counts_have_names_where_a_class_has_a_column():
    detail = svg.Detail(1, 1, 1, 2000)
    names = ["airplane", "automobile", "an exceedingly long name"]
    drawn = svg.holdings([[1, 2, 3]] * 4, names, "", detail)
    assert ">automobile</text>" in drawn
    assert ">an exceedingl…</text>" in drawn
    many = svg.holdings([[1] * 200] * 4, [f"class{c}" for c in range(200)], "", detail)
    assert "class1<" not in many
    assert ">0</text>" in many


def test_the_heading_of_figures_over_cells_names_the_cells_that_they_cover():
    made = study(cells=("IF 10", "IF 50", "IF 100"))
    made.records = [each for each in made.records if (each.cell, each.arm, each.seed) != ("IF 50", "fedavg", 5)]
    assert "<h3>Over cells IF 10; IF 100 (all arms have the same seeds there)</h3>" in render(made)


def test_a_report_names_unsealed_runs_and_versions_of_the_code():
    made = study()
    made.records[0] = replace(made.records[0], sealed=False, made={"codes": ["d" * 64]})
    text = render(made, mix_versions=True)
    assert "<h3>Unsealed: no hash binds these figures to their runs</h3>" in text
    assert "<h3>Versions of the code</h3>" in text
