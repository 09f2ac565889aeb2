import copy

import pytest
from rich.console import Console

from raylt.formatting import interval_text, percent, size, with_images
from raylt.runs.folder.summary import summarise, table_of

CONCLUDED = {"model_sha256": "ab" * 32, "task": "classification"}


def report(step, accuracy, phase="round", seconds=1.0, evaluation_seconds=0.5, **changes):
    judged = accuracy is not None
    return {
        "step": step,
        "phase": phase,
        "seconds": seconds,
        "evaluation_seconds": evaluation_seconds,
        "accuracy": accuracy,
        "global_accuracy": accuracy,
        "global_macro": 0.4,
        "global_miou": 0.2,
        "macro": 0.5,
        "miou": 0.25,
        "others": None,
        "quality": None,
        "answers": None,
        "groups": {"many": 0.8125, "medium": None, "few": 0.125} if judged else None,
        "clients": {
            "owned": {"mean": 0.6, "worst_decile": 0.2},
            "matched": {"mean": 0.7, "worst_decile": 0.3},
            "global": {"mean": 0.5, "worst_decile": 0.5},
        }
        if judged
        else None,
        "traffic": {"train": {"down": 1000, "up": 2000, "replies": 2}},
        "lost": [],
        "retried": [],
        "rejected": {},
        "participants": [0, 2],
        "by_client": {
            "owned": [0.5, None, 0.7],
            "matched": [0.6, None, 0.8],
            "global": [0.5, None, 0.5],
            "miou": [0.25, None, 0.5],
        },
        "figures": {},
    } | changes


def summary_of(*reports):
    return summarise(list(reports), "fedavg", "cd" * 32, None, CONCLUDED)


def printed(summary) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table_of(summary))
    return capture.get()


def test_figures_of_a_short_run():
    summary = summary_of(report(1, 0.25), report(2, 0.75), report(3, 0.5))
    # last10: (0.25 + 0.75 + 0.5) / 3
    assert summary["accuracy"] == {"last": 0.5, "last10": 0.5, "last10_values": 3, "best": 0.75}
    assert (summary["method"], summary["rounds"], summary["split_sha256"]) == ("fedavg", 3, "cd" * 32)
    assert summary["model_sha256"] == "ab" * 32
    assert summary["groups"] == {"many": 0.8125, "medium": None, "few": 0.125}
    assert (summary["global_accuracy"], summary["before_finish"]) == (0.5, None)


def test_last10_averages_the_last_ten_rounds():
    # rounds 3 to 12 have the accuracy round / 16: (3 + .. + 12) / 10 / 16 = 7.5 / 16
    summary = summary_of(*(report(n, n / 16) for n in range(1, 13)))
    assert summary["accuracy"]["last10"] == 7.5 / 16
    assert summary["accuracy"]["last10_values"] == 10
    assert summary["shown"]["last10"] == 7.5 / 16
    assert "accuracy, mean of the last 10 " in printed(summary)


def test_last10_averages_rounds_that_were_judged():
    # judged in rounds 2, 4, .. 24; the last ten of them are 6, 8, .. 24 with the mean 15
    reports = [report(n, n / 32 if n % 2 == 0 else None) for n in range(1, 25)]
    assert summary_of(*reports)["accuracy"]["last10"] == 15 / 32


def test_finish_counts_for_last_and_best_and_not_for_the_curve_of_rounds():
    summary = summary_of(report(1, 0.25), report(2, 0.5), report(3, 0.875, "finish", seconds=100.0))
    assert summary["accuracy"] == {"last": 0.875, "last10": 0.375, "last10_values": 2, "best": 0.875}
    assert (summary["before_finish"], summary["rounds"]) == (0.5, 2)
    assert summary["seconds_per_round"] == 1.0  # the finish does not count


def test_a_finish_that_harms_does_not_change_the_best():
    summary = summary_of(report(1, 0.75), report(2, 0.5, "finish"))
    assert (summary["accuracy"]["best"], summary["accuracy"]["last"], summary["before_finish"]) == (0.75, 0.5, 0.75)


def test_clients_are_judged_on_their_own_class_mix():
    summary = summary_of(report(1, 0.5))
    assert (summary["clients"]["mean"], summary["clients"]["worst_decile"]) == (0.7, 0.3)
    assert summary["clients"]["by"]["owned"] == {"mean": 0.6, "worst_decile": 0.2}
    assert set(summary["clients"]["by"]) == {"owned", "matched", "global"}


def test_clients_that_took_part_and_those_that_never_did_have_means_of_their_own():
    each = {"owned": [0.5, None, 0.25, 1.0], "matched": [0.25, None, 0.5, 0.75], "global": [0.5] * 4, "miou": [0.5] * 4}
    clients = summary_of(
        report(1, 0.5, participants=[0]),
        report(2, 0.5, participants=[0, 1]),
        report(3, 0.5, participants=[2], by_client=each),
    )["clients"]
    # client 1 took part but is not judged
    assert {kind: figure["mean"] for kind, figure in clients["sampled"].items() if kind != "count"} == {
        "owned": 0.375,
        "matched": 0.375,
        "global": 0.5,
        "miou": 0.5,
    }
    assert clients["sampled"]["matched"]["worst_decile"] == 0.25
    assert clients["never_sampled"]["matched"] == {"mean": 0.75, "worst_decile": 0.75}
    assert (clients["sampled"]["count"], clients["never_sampled"]["count"]) == (2, 1)


def test_the_table_tells_those_that_never_took_part_only_where_there_are_some():
    some = summary_of(report(1, 0.5, participants=[0]))
    assert "60.00 % (1) / 80.00 % (1)" in printed(some)
    everyone = summary_of(report(1, 0.5))
    assert everyone["clients"]["never_sampled"] is None
    assert "never sampled" not in printed(everyone)


def test_the_main_figure_of_own_models_is_averaged_over_rounds_that_have_it():
    def own(step, mean, phase="round"):
        spread = {"mean": mean, "worst_decile": 0.1}
        return report(step, 0.25, phase, shown="matched", clients={"matched": spread, "owned": spread})

    # the first round has an accuracy of the global model alone, which is another figure
    shown = summary_of(report(1, 0.9375), own(2, 0.5), own(3, 0.625), own(4, 0.875, "finish"))["shown"]
    assert shown == {"figure": "matched", "last": 0.875, "last10": 0.5625, "best": 0.875, "before_finish": 0.625}


def test_a_guarantee_is_that_of_the_last_upload_with_noise():
    budgets = [{"epsilon": epsilon, "delta": 1e-5, "unit": "client", "not_covered": "x: y"} for epsilon in (1.5, 2.5)]
    reports = [report(step, 0.5, figures={"privacy": budget}) for step, budget in enumerate(budgets, 1)]
    summary = summary_of(*reports, report(3, 0.5, "finish"))
    assert summary["privacy"] == budgets[1]
    assert "2.5, 1e-05 for client; without x" in printed(summary)


def test_other_models_and_new_clients_are_shown_by_their_own_class_mix():
    spreads = {"owned": {"mean": 0.2, "worst_decile": 0.1}, "matched": {"mean": 0.33, "worst_decile": 0.1}}
    new = {"count": 4, "owned": 0.15, "matched": 0.35}
    text = printed(
        summary_of(
            report(1, 0.5, others={"local": {"clients": spreads, "by_client": {}}}, figures={"new_clients": new})
        )
    )
    assert "clients' own models, local" in text
    assert "33.00 %" in text
    assert "35.00 % (4)" in text


def test_bytes_are_summed_over_rounds_and_kinds_of_call():
    both = {"join": {"down": 1, "up": 2, "replies": 2}, "train": {"down": 10, "up": 20, "replies": 2}}
    summary = summary_of(report(1, 0.5, traffic=both), report(2, 0.5), report(3, 0.5, "finish", traffic={}))
    assert summary["bytes"] == {"up": 2 + 20 + 2000, "down": 1 + 10 + 1000}


def test_seconds_count_training_and_evaluation_of_every_step():
    summary = summary_of(
        report(1, 0.5, seconds=2.0),
        report(2, 0.5, seconds=4.0),
        report(3, 0.5, "finish", seconds=8.0, evaluation_seconds=0.25),
    )
    assert summary["seconds"] == 2 + 4 + 8 + 0.5 + 0.5 + 0.25
    assert summary["seconds_per_round"] == (2 + 4) / 2


def test_troubles_are_counted_over_the_run():
    summary = summary_of(
        report(1, 0.5, lost=[3], retried=[3, 3]), report(2, 0.5, lost=[1], rejected={"4": "w", "5": "w"})
    )
    assert summary["troubles"] == {"lost": 2, "retried": 2, "rejected": 2, "server_deaths": 0}


def test_reports_are_left_alone():
    reports = [report(1, 0.5), report(2, 0.5)]
    before = copy.deepcopy(reports)
    summarise(reports, "fedavg", "", None, CONCLUDED)
    assert reports == before


def test_table_shows_each_figure():
    summary = summary_of(
        report(1, 0.25, traffic={"train": {"down": 3 * 2**20, "up": 5 * 2**10, "replies": 1}}),
        report(2, 0.75, lost=[1], rejected={"4": "w"}, traffic={}),
        report(3, 0.625, "finish", traffic={}),
    )
    lines = {
        name.strip(): value.strip()
        for name, _, value in (
            line.strip(" │").partition("│") for line in printed(summary).splitlines() if line.startswith("│")
        )
    }
    assert lines == {
        "accuracy, last": "62.50 %",
        "accuracy, before the last phase": "75.00 %",
        "accuracy, mean of all 2 evaluated rounds": "50.00 %",
        "accuracy, best": "75.00 %",
        "many / medium / few": "81.25 % / - / 12.50 %",
        "many / medium / few, before it": "81.25 % / - / 12.50 %",
        "clients, mean (own class mix)": "70.00 %",
        "clients, worst decile": "30.00 %",
        "bytes up / down": "5.0 KiB / 3.0 MiB",
        "seconds per round": "1.00",
        "client calls": "1 lost, 1 rejected",
        "split sha256": "cd" * 8,
        "model sha256": "ab" * 8,
    }
    assert "fedavg, rounds: 2" in printed(summary)


def test_table_of_a_smooth_run_names_no_troubles_and_no_last_phase():
    text = printed(summary_of(report(1, 0.25)))
    assert "client calls" not in text
    assert "before the last phase" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2.5 * 2**30, "2.5 GiB"),
        (2**40, "1.0 TiB"),
        (3000 * 2**40, "3000.0 TiB"),
    ],
)
def test_size_is_in_binary_units(count, text):
    assert size(count) == text


def test_percent_of_nothing_is_a_dash():
    assert (percent(None), percent(0.0), percent(1.0), percent(0.12345)) == ("-", "0.00 %", "100.00 %", "12.35 %")


def test_text_figures_of_the_last_step_are_in_the_table():
    summary = summary_of(
        report(1, 0.25, figures={"teacher": "of before"}),
        report(2, 0.5, figures={"teacher": "none: no distillation", "loss": 1.25}),
    )
    assert summary["figures"] == {"teacher": "none: no distillation", "loss": 1.25}
    text = printed(summary)
    assert "none: no distillation" in text
    assert "of before" not in text
    assert "loss" not in text


def test_figures_stand_with_their_test_images():
    tests = {
        "images": 240,
        "groups": {"many": 200, "medium": 0, "few": 40},
        "thresholds": [20, 60],
        "own": [30, 0, 10],
        "one_class": ["Bern"],
    }
    own = {"mean": 0.65, "worst_decile": 0.5}
    final = report(1, 0.5)
    final["clients"] = final["clients"] | {"local": own}
    final["by_client"] = final["by_client"] | {"local": [0.8, None, 0.5]}
    summary = summarise([final], "fedavg", "cd" * 32, tests, CONCLUDED)
    assert summary["tests"] == tests
    assert summary["clients"]["pooled"] == pytest.approx((30 * 0.8 + 10 * 0.5) / 40)
    text = printed(summary)
    assert "50.00 % (n = 240)" in text
    assert "65.00 % (2 clients, 10 to 30 images each)" in text
    assert "72.50 % (n = 40, 57.2 to 83.9 %)" in text  # figures of fewer than 100 images have an interval
    assert "> 60 / 20 to 60 / < 20; 200 / 0 / 40" in text
    assert "1, whose figures say nothing: Bern" in text
    # 0.125 of 40 images; the many have 200 images, and the medium none
    assert "- / - / 5.5 to 26.1 %" in text
    final["by_client"]["local"] = [0.0, None, 0.5]
    none_right = summarise([final], "fedavg", "cd" * 32, tests, CONCLUDED)
    assert none_right["clients"]["pooled"] == pytest.approx(10 * 0.5 / 40)


def test_an_interval_stands_behind_figures_of_fewer_than_100_images():
    assert with_images(0.5, 100, "classification") == "50.00 % (n = 100)"
    assert with_images(0.5, 99, "classification") == f"50.00 % (n = 99, {interval_text(0.5, 99)})"
    assert with_images(0.5, 99, "segmentation") == "50.00 % (n = 99)"  # a share of pixels is not binomial
