import re

import pytest

from raylt.errors import ConfigError
from raylt.studies.expectations import expectations, identity
from raylt.studies.page import page
from raylt.studies.records import Record
from raylt.studies.reproduce import command, name_of, plan, select
from raylt.studies.verdicts import count, verdicts

FASHION = select("mupfl", "2", {"dataset": "fashion_mnist", "IF": "100", "alpha": "0.5"})
MUPFL = next(e for e in FASHION if e.method == "MuPFL")
FEDAVG = next(e for e in FASHION if e.method == "FedAvg")


def run(cell, seed, value, rounds=None, state="done"):
    """A run of a printed cell with this figure; rounds of the paper by default."""
    config = cell.config().model_dump(mode="json")
    config["seed"] = config["data"]["seed"] = seed
    config["federation"]["rounds"] = rounds or config["federation"]["rounds"]
    figures = {"matched": {"mean": value, "worst_decile": 0.0}}
    return Record("", cell.arm, seed, f"{cell.arm}/{seed}", state=state, config=config, summary={
        "clients": {"by": figures}, "split_sha256": "ab" * 32, "model_sha256": "cd" * 32})


def verdict(*records):
    return next(v for v in verdicts(records, [MUPFL]))


def test_printed_value_inside_our_interval_is_reproduced():
    # 94.11 printed; mean 94.0, sd 0.5 over three: +- 4.30 * 0.5 / sqrt(3) = 1.24
    found = verdict(*(run(MUPFL, seed, 0.94 + d) for seed, d in enumerate((-0.005, 0.0, 0.005))))
    assert (found.kind, found.seeds) == ("reproduced", 3)


def test_printed_difference_inside_ours_is_the_difference_reproduced():
    # 94.11 - 81.76 = 12.35 printed; ours 12.3 +- 0.25 around values that are ten points lower
    records = [run(cell, seed, value + d) for cell, value, each in ((MUPFL, 0.84, (0, 0.011, 0.019)),
               (FEDAVG, 0.717, (0, 0.01, 0.02))) for seed, d in enumerate(each)]
    found = verdict(*records)
    assert found.kind == "difference reproduced"
    assert round(100 * found.printed_difference, 2) == 12.35


def test_neither_is_outside_with_how_far():
    found = verdict(*(run(MUPFL, seed, 0.84 + seed / 1000) for seed in range(3)))
    assert (found.kind, found.why) == ("outside", "by -10.01 points")


def test_fewer_rounds_and_one_seed_claim_nothing():
    short = verdict(*(run(MUPFL, seed, 0.94 + seed / 1000, rounds=4) for seed in range(3)))
    assert (short.kind, short.scale) == ("at reduced scale", 0.1)
    assert verdict(run(MUPFL, 0, 0.9411)).kind == "too few seeds"


def test_two_seeds_and_more_rounds_claim_nothing_either():
    two = verdict(run(MUPFL, 0, 0.80), run(MUPFL, 1, 0.99))
    assert (two.kind, two.seeds) == ("too few seeds", 2)
    longer = [run(MUPFL, seed, 0.94 + seed / 1000, rounds=80) for seed in range(3)]
    assert (verdict(*longer).kind, verdict(*longer).scale) == ("longer than the paper", 2)
    assert "| longer than the paper (2 of the rounds) |" in page(verdicts(longer))
    assert verdict(*longer, *(run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3))).kind == "reproduced"


def test_an_interval_that_holds_nearly_anything_reproduces_nothing():
    # mean 94, sd 5 over three: +- 4.30 * 5 / sqrt(3) = 12.4
    wide = verdict(*(run(MUPFL, seed, 0.94 + d) for seed, d in enumerate((-0.05, 0.0, 0.05))))
    assert (wide.kind, wide.why) == ("cannot be told", "± 12.4 points")
    # the value is ten points off; differences of 7.9, 12 and 16.1 points hold the printed 12.35, and much else:
    # +- 4.30 * 4.1 / sqrt(3) = 10.2
    base = [run(FEDAVG, seed, 0.72 + d) for seed, d in enumerate((0.04, 0.0, -0.04))]
    mine = [run(MUPFL, seed, 0.84 + d) for seed, d in enumerate((-0.001, 0.0, 0.001))]
    found = verdict(*base, *mine)
    assert found.kind == "cannot be told"
    assert "outside by -10.11 points, the difference is known to ± 10.2 points" in found.why


def test_only_runs_of_one_split_are_paired_and_the_others_are_named():
    mine = [run(MUPFL, seed, 0.84 + seed / 1000) for seed in range(3)]
    base = [run(FEDAVG, seed, 0.7165 + seed / 1000) for seed in range(3)]
    base[2].summary["split_sha256"] = "ef" * 32
    found = verdict(*mine, *base)
    assert (found.kind, found.difference.n) == ("outside", 2)
    assert "1 of 3 seeds have another split than FedAvg's" in found.why
    assert verdict(*mine, *(run(FEDAVG, seed, 0.7165 + seed / 1000) for seed in range(3))).difference.n == 3


def test_of_several_runs_of_a_seed_the_first_is_taken_and_that_is_said():
    mine = [run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)]
    assert verdict(*mine, mine[1]).why == ""                        # the same run in two files
    other = run(MUPFL, 1, 0.2)
    other.summary["model_sha256"] = "ef" * 32
    found = verdict(*mine, other)
    assert (found.kind, found.why) == ("reproduced", "several runs of seed 1: the first of each")


def test_runs_of_several_versions_of_the_code_are_counted():
    mine = [run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)]
    for each in mine:
        each.made.update({"raylt": "1", "torch": "2", "device": "cpu", "codes": ["a" if each.seed else "b"]})
    mixed, = verdicts(mine, [MUPFL], mix_versions=True)
    assert (mixed.seeds, mixed.made) == (3, "raylt 1, torch 2, cpu, 2 versions of the code")


def test_runs_of_several_versions_of_the_code_are_not_taken_together_unless_told():
    mine, base = ([run(cell, seed, value + seed / 1000) for seed in range(4)] for cell, value in (
        (MUPFL, 0.94), (FEDAVG, 0.82)))
    for each in [*mine, *base]:
        each.made["codes"] = ["new" if each.seed or each.arm == FEDAVG.arm else "old"]
    base[3].made["codes"] = ["old"]
    found = verdict(*mine, *base)
    assert (found.seeds, found.difference.n) == (3, 2)      # three by the new code, of which two have a FedAvg by it
    assert "left out, by another version of the code: 1 run; --mix-versions" in found.why
    assert "left out, by another version of the code: 1 run of FedAvg; --mix-versions" in found.why
    mixed, = verdicts([*mine, *base], [MUPFL], mix_versions=True)
    assert (mixed.seeds, mixed.difference.n, mixed.why) == (4, 4, "")


def test_full_runs_count_where_there_are_short_ones_too():
    found = verdict(run(MUPFL, 0, 0.2, rounds=4), *(run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)))
    assert (found.kind, found.seeds) == ("reproduced", 3)


def test_runs_that_are_not_done_or_of_no_cell_are_not_looked_at():
    other = run(MUPFL, 0, 0.94)
    other.config["local"]["lr"] = 0.5
    assert verdict(other, run(MUPFL, 1, 0.94, state="stopped")).kind == "not run"


def test_without_a_method_a_cell_cannot_be_run_and_says_why():
    missing = next(e for e in expectations() if e.problem)
    found = verdicts([], [missing])[0]
    assert (found.kind, found.why) == ("cannot be run", missing.problem)


def test_the_page_counts_all_cells_and_has_a_line_for_each():
    judged = verdicts([run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)])
    text = page(judged)
    # one run of MuPFL is Table 2's and Table 6's last row
    assert count(judged)["reproduced"] == 2
    assert "Of 640 printed cells 2 have recorded runs here" in text
    lines = [line for line in text.splitlines() if re.match(r"\| \S+.*\| .*\d\.\d\d", line)]
    assert sum("`raylt run " in line for line in lines) == count(judged)["not run"]
    reasons = {e.problem for e in expectations() if e.problem}
    assert sum(any(reason in line for reason in reasons) for line in lines) == count(judged)["cannot be run"]
    assert "abababab" in text


def test_a_study_of_a_table_runs_each_cell_once_and_names_its_scale():
    definition = plan(FASHION, "x", 2, 0.1)
    runs = definition.runs()
    assert {each.arm for each in runs} == {e.method for e in FASHION if e.problem is None}
    assert len(runs) == 2 * len({each.arm for each in runs})
    assert {each.config.federation.rounds for each in runs} == {4}
    assert (definition.reference, definition.measure, definition.paper) == ("FedAvg", "matched", "MuPFL")
    assert name_of("mupfl", "2", {"IF": "100"}, 0.1) == "mupfl-table2-if100-scale0.1"


@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_whole_papers_make_a_study_without_a_run_twice(paper):
    definition = plan(select(paper), paper, 1, 1.0)
    runs = [identity(each.config.model_dump(mode="json")) for each in definition.runs()]
    assert len(set(runs)) == len(runs)
    assert set(runs) == {e.identity() for e in select(paper) if e.problem is None}


def test_commands_are_what_a_person_types():
    sfd = next(e for e in expectations() if e.method == "SFD w/o MeanCov aligner")
    assert command(sfd) == "raylt run recipe:sfd/cifar10_if100_alpha0.05_k10 method.aligner=false"


@pytest.mark.parametrize(("arguments", "message"), [
    (("fedsmm",), "no such paper; there are: sfd, fedsm"),
    (("sfd", "9"), "has no table 9"),
    (("sfd", "1", {"IF": "7"}), "IF has 100, 50"),
    (("sfd", "1", {"if": "100"}), "keys are dataset, IF"),
    (("sfd", "1", {}, ["SFDD"]), "did you mean SFD"),
])
def test_what_is_not_printed_is_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        select(*arguments)


def test_cells_without_any_method_cannot_be_planned():
    cannot = [e for e in expectations() if e.problem][:3]
    with pytest.raises(ConfigError, match=f"none of the 3 cells can be run: {cannot[0].problem}"):
        plan(cannot, "x", 1, 1.0)
