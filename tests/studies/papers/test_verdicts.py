import re
from dataclasses import replace

import pytest
from refusals import refused

from raylt.errors import ConfigError
from raylt.studies.papers.printed_tables import base_of, expectations, identity
from raylt.studies.papers.reproduce import command, name_of, numbers_of, plan, select
from raylt.studies.papers.verdict_page import page
from raylt.studies.papers.verdicts import count, verdicts
from raylt.studies.records.record import RunRecord

FASHION = select("mupfl", "2", {"dataset": "fashion_mnist", "IF": "10", "alpha": "0.5"})
MUPFL = next(e for e in FASHION if e.method == "MuPFL")
FEDAVG = next(e for e in FASHION if e.method == "FedAvg")


def run(cell, seed, value, rounds=None, state="done"):
    """Return a run of a printed cell with this figure; by default it has the paper's rounds."""
    config = cell.config().model_dump(mode="json")
    config["seed"] = config["data"]["seed"] = seed
    config["federation"]["rounds"] = rounds or config["federation"]["rounds"]
    figures = {"matched": {"mean": value, "worst_decile": 0.0}}
    return RunRecord(
        "",
        cell.arm,
        seed,
        f"{cell.arm}/{seed}",
        state=state,
        config=config,
        summary={"clients": {"by": figures}, "split_sha256": "ab" * 32, "model_sha256": "cd" * 32},
    )


def verdict(*records):
    return next(v for v in verdicts(records, [MUPFL]))


def test_printed_value_inside_our_interval_is_reproduced():
    # 94.11 is printed; mean 94.0, sd 0.5 over three runs: +- 4.30 * 0.5 / sqrt(3) = 1.24
    judged = verdict(*(run(MUPFL, seed, 0.94 + d) for seed, d in enumerate((-0.005, 0.0, 0.005))))
    assert (judged.kind, judged.seeds) == ("reproduced", 3)


def test_printed_difference_inside_ours_is_the_difference_reproduced():
    # 94.11 - 81.76 = 12.35 is printed; ours is 12.3 +- 0.25, with values that are ten points lower
    records = [
        run(cell, seed, value + d)
        for cell, value, each in ((MUPFL, 0.84, (0, 0.011, 0.019)), (FEDAVG, 0.717, (0, 0.01, 0.02)))
        for seed, d in enumerate(each)
    ]
    judged = verdict(*records)
    assert judged.kind == "difference reproduced"
    assert round(100 * judged.printed_difference, 2) == 12.35


def test_neither_is_outside_with_how_far():
    judged = verdict(*(run(MUPFL, seed, 0.84 + seed / 1000) for seed in range(3)))
    assert (judged.kind, judged.why) == ("outside", "by -10.01 points")


def test_runs_that_failed_are_named_and_the_others_confirm_nothing():
    whole = [run(MUPFL, seed, 0.94 + d) for seed, d in enumerate((-0.005, 0.0, 0.005))]
    failed = run(MUPFL, 3, 0.0, state="failed")
    judged = verdict(*whole, failed)
    assert (judged.kind, judged.seeds, judged.why) == ("cannot be told", 3, "1 run failed")
    assert (verdict(failed).kind, verdict(failed).why) == ("not run", "1 run failed")
    made = [replace(each, made={"codes": ["one"]}) for each in whole]
    assert verdict(*made, failed).why == "1 run failed"  # before its first step
    assert verdict(*made, replace(failed, made={"codes": ["another"]})).kind == "reproduced"
    assert verdict(*whole, run(MUPFL, 3, 0.0, rounds=1, state="failed")).kind == "reproduced"
    assert verdict(*whole, run(MUPFL, 3, 0.0, state="stopped")).kind == "reproduced"


def test_fewer_rounds_and_one_seed_claim_nothing():
    short = verdict(*(run(MUPFL, seed, 0.94 + seed / 1000, rounds=4) for seed in range(3)))
    assert (short.kind, short.scale) == ("at reduced scale", 0.1)
    half = verdict(*(run(MUPFL, seed, 0.5, rounds=rounds) for seed in range(3) for rounds in (4, 20)))
    assert (half.kind, half.scale, half.seeds) == ("at reduced scale", 0.5, 3)  # of several scales the largest
    assert verdict(run(MUPFL, 0, 0.9411)).kind == "too few seeds"


def test_the_difference_to_the_base_is_of_runs_with_as_many_rounds():
    short = [run(cell, seed, value, rounds=4) for cell, value in ((MUPFL, 0.5), (FEDAVG, 0.4)) for seed in range(3)]
    whole_base = [run(FEDAVG, seed, 0.8) for seed in range(3)]
    judged = verdict(*short, *whole_base)
    assert (judged.kind, judged.scale) == ("at reduced scale", 0.1)
    assert judged.difference.difference.estimate == pytest.approx(0.1)


def test_two_seeds_and_more_rounds_claim_nothing_either():
    two = verdict(run(MUPFL, 0, 0.80), run(MUPFL, 1, 0.99))
    assert (two.kind, two.seeds) == ("too few seeds", 2)
    longer = [run(MUPFL, seed, 0.94 + seed / 1000, rounds=80) for seed in range(3)]
    assert (verdict(*longer).kind, verdict(*longer).scale) == ("longer than the paper", 2)
    assert "| longer than the paper (2 of the rounds) |" in page(verdicts(longer))
    assert verdict(*longer, *(run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3))).kind == "reproduced"


def test_an_interval_that_holds_nearly_anything_reproduces_nothing():
    # mean 94, sd 5 over three runs: +- 4.30 * 5 / sqrt(3) = 12.4
    wide = verdict(*(run(MUPFL, seed, 0.94 + d) for seed, d in enumerate((-0.05, 0.0, 0.05))))
    assert (wide.kind, wide.why) == ("cannot be told", "± 12.4 points")
    # the value is ten points off; the interval of the differences 7.9, 12 and 16.1 holds the printed 12.35 and much
    # else:
    # +- 4.30 * 4.1 / sqrt(3) = 10.2
    base = [run(FEDAVG, seed, 0.72 + d) for seed, d in enumerate((0.04, 0.0, -0.04))]
    runs = [run(MUPFL, seed, 0.84 + d) for seed, d in enumerate((-0.001, 0.0, 0.001))]
    judged = verdict(*base, *runs)
    assert judged.kind == "cannot be told"
    assert "outside by -10.11 points, the difference is known to ± 10.2 points" in judged.why


def ablation(*differences, level=0.0, rise=0.002):
    """Return the verdict on Table 6's BAVD row.

    Args:
        differences: to FedAvg, by seed.
        level: shift of all values.
        rise: of FedAvg from one seed to the next.
    """
    table = select("mupfl", "6", {"dataset": "fashion_mnist"})
    bavd = next(e for e in table if e.method == "MuPFL[BAVD]")
    base = [run(FEDAVG, seed, bavd.value + level - 0.05 + seed * rise) for seed in range(len(differences))]
    values = [
        record.summary["clients"]["by"]["matched"]["mean"] + d for record, d in zip(base, differences, strict=True)
    ]
    return bavd, verdicts([*base, *(run(bavd, seed, value) for seed, value in enumerate(values))], [bavd])[0]


def test_a_row_of_an_ablation_is_reproduced_by_its_difference_and_never_by_its_level_alone():
    bavd, level_alone = ablation(0.049, 0.05, 0.051)
    assert level_alone.ours.holds(bavd.value)
    assert (bavd.ablation, level_alone.kind) == (True, "outside")
    printed = bavd.value - FEDAVG.value
    inside = (printed - 0.001, printed, printed + 0.001)
    assert ablation(*inside, level=0.05 - printed)[1].kind == "reproduced"
    assert ablation(*inside, level=-0.2)[1].kind == "difference reproduced"
    assert ablation(printed - 0.1, printed, printed + 0.1)[1].kind == "cannot be told"
    assert ablation(printed - 0.001, printed)[1].kind == "too few seeds"
    assert ablation(printed, printed, printed)[1].kind == "cannot be told"  # no interval
    rows = [run(bavd, seed, bavd.value + seed / 1000) for seed in range(3)]
    assert verdicts(rows, [bavd])[0].kind == "cannot be told"
    two_bases = [run(FEDAVG, seed, FEDAVG.value + 1.1 * seed / 1000) for seed in range(2)]
    few = verdicts([*rows, *two_bases], [bavd])[0]
    assert (few.seeds, few.difference.n, few.kind) == (3, 2, "cannot be told")


def test_a_level_that_is_not_known_well_leaves_an_ablation_with_its_difference():
    # values rise by 4 points from seed to seed about the printed one: +- 4.30 * 4 / sqrt(3) = 9.9
    printed = ablation(0.0)[0].value - FEDAVG.value
    inside = (printed - 0.001, printed, printed + 0.001)
    bavd, judged = ablation(*inside, level=0.05 - printed - 0.04, rise=0.04)
    assert judged.ours.holds(bavd.value)
    assert judged.ours.half == pytest.approx(0.1, abs=0.005)
    assert (judged.difference.difference.half < 0.05, judged.kind) == (True, "difference reproduced")


def test_the_base_of_an_ablation_is_fedavg_of_its_setting_in_another_table():
    bavd, judged = ablation(0.01, 0.02, 0.03)
    assert (bavd.table, FEDAVG.table) == ("6", "2")
    assert judged.printed_difference == pytest.approx(bavd.value - FEDAVG.value)


def test_mupfl_without_its_modules_is_fedavg_judged_by_its_global_model():
    off = {"bavd": False, "acmu": False, "pkcf": False}
    records = []
    for seed in range(3):
        record = run(MUPFL, seed, 0.9)
        record.config["method"] |= off
        shared = {"accuracy": 0.5, "groups": {}, "clients": {"matched": {"mean": FEDAVG.value + (seed - 1) / 100}}}
        record.summary["others"] = {"global": shared}
        records.append(record)
    judged = verdicts(records, [FEDAVG])[0]
    assert (judged.kind, judged.seeds) == ("reproduced", 3)
    assert judged.ours.estimate == pytest.approx(FEDAVG.value)
    for field, value in (("pkcf", True), ("dropout", 0.3)):
        for record in records:
            record.config["method"] |= off | {"dropout": 0.0} | {field: value}
        assert verdicts(records, [FEDAVG])[0].kind == "not run"


def test_seeds_without_any_spread_reproduce_nothing():
    equal = verdict(*(run(MUPFL, seed, MUPFL.value) for seed in range(3)))
    assert equal.kind == "cannot be told"


def test_only_runs_of_one_split_are_paired_and_the_others_are_named():
    runs = [run(MUPFL, seed, 0.84 + seed / 1000) for seed in range(3)]
    base = [run(FEDAVG, seed, 0.7165 + seed / 1000) for seed in range(3)]
    base[2].summary["split_sha256"] = "ef" * 32
    judged = verdict(*runs, *base)
    assert (judged.kind, judged.difference.n) == ("outside", 2)
    assert "1 of 3 seeds not paired" in judged.why
    assert verdict(*runs, *(run(FEDAVG, seed, 0.7165 + seed / 1000) for seed in range(3))).difference.n == 3


def test_of_several_runs_of_a_seed_the_first_is_taken_and_that_is_said():
    runs = [run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)]
    assert verdict(*runs, runs[1]).why == ""  # the same run in two files
    other = run(MUPFL, 1, 0.2)
    other.summary["model_sha256"] = "ef" * 32
    judged = verdict(*runs, other)
    assert (judged.kind, judged.why) == ("reproduced", "several runs of seed 1; the first counts")


def test_runs_of_several_versions_of_the_code_are_counted():
    runs = [run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)]
    for each in runs:
        made = {"raylt": "1", "torch": "2", "device": "cpu", "precision": "tf32" if each.seed else "float32"}
        each.made.update({**made, "codes": ["a" if each.seed else "b"]})
    (mixed,) = verdicts(runs, [MUPFL], mix_versions=True)
    assert (mixed.seeds, mixed.made) == (3, "raylt 1, torch 2, cpu, float32, tf32, 2 versions of the code")


def test_runs_of_several_versions_of_the_code_are_combined_only_if_allowed():
    runs, base = (
        [run(cell, seed, value + seed / 1000) for seed in range(4)] for cell, value in ((MUPFL, 0.94), (FEDAVG, 0.82))
    )
    for each in [*runs, *base]:
        each.made["codes"] = ["new" if each.seed or each.arm == FEDAVG.arm else "old"]
    base[3].made["codes"] = ["old"]
    judged = verdict(*runs, *base)
    # three runs with the new code, of which two have a FedAvg run with it
    assert (judged.seeds, judged.difference.n) == (3, 2)
    assert "left out, by another version of the code: 1 run; --mix-versions" in judged.why
    assert "left out, by another version of the code: 1 run of FedAvg; --mix-versions" in judged.why
    (mixed,) = verdicts([*runs, *base], [MUPFL], mix_versions=True)
    assert (mixed.seeds, mixed.difference.n, mixed.why) == (4, 4, "")


def test_full_runs_count_where_there_are_short_ones_too():
    judged = verdict(run(MUPFL, 0, 0.2, rounds=4), *(run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)))
    assert (judged.kind, judged.seeds) == ("reproduced", 3)


def test_runs_that_are_not_done_or_of_no_cell_are_not_looked_at():
    other = run(MUPFL, 0, 0.94)
    other.config["local"]["lr"] = 0.5
    assert verdict(other, run(MUPFL, 1, 0.94, state="stopped")).kind == "not run"


def test_without_a_method_a_cell_cannot_be_run_and_says_why():
    missing = next(e for e in expectations() if e.problem)
    judged = verdicts([], [missing])[0]
    assert (judged.kind, judged.why) == ("cannot be run", missing.problem)


def test_the_page_counts_all_cells_and_has_a_line_for_each():
    judged = verdicts([run(MUPFL, seed, 0.94 + seed / 1000) for seed in range(3)])
    text = page(judged)
    # one MuPFL run is in Table 2 and in Table 6's last row, which belongs to an ablation and lacks a FedAvg run here
    assert (count(judged)["reproduced"], count(judged)["cannot be told"]) == (1, 1)
    assert re.search(r"\b640 printed cells, 2 have recorded runs\b", text)
    lines = [line for line in text.splitlines() if re.match(r"\| \S+.*\| .*\d\.\d\d", line)]
    assert sum("`raylt run " in line for line in lines) == count(judged)["not run"]
    reasons = {e.problem for e in expectations() if e.problem}
    assert sum(any(reason in line for reason in reasons) for line in lines) == count(judged)["cannot be run"]
    assert "abababab" in text


def test_a_line_of_the_page_has_the_printed_and_the_measured_figures():
    # the values 84, 85.1 and 85.9 have a sd of 0.954: +- 4.30 * 0.954 / sqrt(3) = 2.37; the differences 12.3 to 12.4
    records = [
        run(cell, seed, value + d)
        for cell, value, each in ((MUPFL, 0.84, (0, 0.011, 0.019)), (FEDAVG, 0.717, (0, 0.01, 0.02)))
        for seed, d in enumerate(each)
    ]
    lines = page(verdicts(records, [MUPFL, FEDAVG])).splitlines()
    [line] = [line for line in lines if "| MuPFL |" in line]
    assert "| 94.11 | 85.00 ± 2.37 (3 seeds) | +12.35 | +12.30 ± 0.25 | difference reproduced |" in line
    assert "| 2 | 2 | 2 | 0 | 0 |" in lines  # Table 2: its cells, those with runs, without runs, and that cannot be run
    deviating = next(each for each in expectations() if each.std is not None and each.value == 0.23)
    assert "| 23.00 (sd 2.0) |" in page(verdicts([], [deviating]))


def test_a_study_of_a_table_runs_each_cell_once_and_names_its_scale():
    definition = plan(FASHION, "x", 2, 0.1)
    runs = definition.runs()
    assert {each.arm for each in runs} == {e.method for e in FASHION if e.problem is None}
    assert len(runs) == 2 * len({each.arm for each in runs})
    assert {each.config.federation.rounds for each in runs} == {4}
    assert (definition.reference, definition.measure, definition.paper) == ("FedAvg", "matched", "MuPFL")
    assert name_of("mupfl", "table2", {"IF": "100"}, 0.1) == "mupfl-table2-if100-scale0.1"


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_whole_papers_make_a_study_without_a_run_twice(paper):
    definition = plan(select(paper), paper, 1, 1.0)
    runs = [identity(each.config.model_dump(mode="json")) for each in definition.runs()]
    assert len(set(runs)) == len(runs)
    assert set(runs) == {e.identity() for e in select(paper) if e.problem is None}


def test_a_record_from_before_a_field_of_its_method_belongs_to_the_same_cell():
    record = run(MUPFL, 0, 0.94)
    assert record.config["method"].pop("dropout") == 0
    assert identity(record.config) == MUPFL.identity()
    record.config["method"]["dropout"] = 0.5
    assert identity(record.config) != MUPFL.identity()


def test_a_study_of_ablations_runs_what_they_are_compared_with():
    for paper, table in (("mupfl", "6"), ("bpfed", "4"), ("sfd", "3"), ("fedsm", "IV")):
        cells = [each for each in select(paper, table) if each.problem is None]
        runs = {identity(each.config.model_dump(mode="json")) for each in plan(cells, "x", 1, 1.0).runs()}
        bases = {base.identity() for each in cells if each.ablation and (base := base_of(each)) is not None}
        assert bases
        assert bases <= runs


def test_fine_tuning_clip_is_compared_with_fedsm_itself():
    tuned = next(each for each in expectations() if each.method == "FedSM w/ CLIP fine-tuning")
    base = base_of(tuned)
    assert base is not None
    assert base.method == "FedSM w/o CLIP fine-tuning"
    runs = [run(tuned, seed, tuned.value + seed / 1000) for seed in range(3)]
    for each in runs:
        each.curve["accuracy"] = [tuned.value + each.seed / 1000]
        each.summary.update(rounds=1, accuracy={"last": tuned.value + each.seed / 1000})
    assert "difference to FedSM w/o CLIP fine-tuning" in verdicts(runs, [tuned])[0].why


def test_rows_with_other_epochs_are_no_ablations():
    cells = [each for each in expectations() if "E" in each.setting]
    assert cells
    assert not any(each.ablation for each in cells)


def test_fedsms_figures_are_those_of_the_best_round():
    assert {each.at for each in expectations() if each.paper == "FedSM"} == {"best"}
    assert {each.at for each in expectations() if each.paper != "FedSM"} == {"last"}


def test_ratioloss_has_the_63_images_a_class_of_its_code():
    sizes = {each.changes["data.auxiliary"] for each in expectations() if each.method == "RatioLoss"}
    assert sizes == {63}


def test_commands_are_what_a_person_types():
    sfd = next(e for e in expectations() if e.method == "SFD w/o MeanCov aligner")
    assert command(sfd) == "raylt run recipe:sfd/cifar10_if100_alpha0.05_k10 method.aligner=false"


@pytest.mark.parametrize(
    ("arguments", "key", "value", "choices"),
    [
        (("fedsmm",), "paper", "fedsmm", "sfd, fedsm"),
        (("sfd", "9"), "table", "9", "1, 2"),
        (("bpfed", "of"), "table", "of", "Choose from 2, 3, 4, 4.3.3."),
        (("sfd", "1", {"IF": "7"}), "--cells", "IF=7", "100, 50"),
        (("sfd", "1", {"if": "100"}), "--cells", "if=100", "dataset, IF"),
        (("sfd", "1", {}, ["SFDD"]), "--arms", "SFDD", "Did you mean SFD?"),
    ],
)
def test_a_cell_that_is_not_printed_is_refused_with_the_choices(arguments, key, value, choices):
    with refused("config.unknown-name", ConfigError, key=key, name=value) as caught:
        select(*arguments)
    assert choices in str(caught.value)


@pytest.mark.parametrize("paper", ["sfd", "fedsm", "mupfl", "bpfed"])
def test_a_table_is_selected_by_its_name_and_by_its_numbers(paper):
    for table in {each.table for each in select(paper)}:
        numbers = numbers_of(table)
        assert numbers
        for name in (table, table.lower(), *numbers):
            assert {each.table for each in select(paper, name)} == {table}


def test_cells_without_any_method_cannot_be_planned():
    cannot = [e for e in expectations() if e.problem][:3]
    reasons = list(dict.fromkeys(e.problem for e in cannot))
    with refused("study.not-runnable", ConfigError, cells=3, reasons=reasons):
        plan(cannot, "x", 1, 1.0)
