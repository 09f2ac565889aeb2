"""The commands that list data, methods, settings and recipes."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, refused
from rich.console import Console

from raylt.cli import options
from raylt.cli.method_page import GROUPS, _costs, reflowed
from raylt.config import settings
from raylt.data.augment import AUGMENTATIONS
from raylt.data.sources.sources import NAMES
from raylt.methods import METHODS
from raylt.models import MODELS


def test_classes_and_clients_of_a_split_sum_up(raylt):
    code, out, _ = raylt("data", "data.clients=7", "--format", "json")
    split = json.loads(out)
    assert code == 0
    assert np.array(split["clients"]).shape == (7, 10)
    assert np.array(split["clients"]).sum(0).tolist() == split["classes"]
    assert len(split["names"]) == len(split["groups"]) == 10
    assert set(split["groups"]) == {"many", "medium", "few"}


def test_table_of_a_split_shows_the_sums_of_its_groups(raylt):
    split = json.loads(raylt("data", "--format", "json").out)
    out = raylt("data").out
    sizes = [n for n, group in zip(split["classes"], split["groups"], strict=True) if group == "few"]
    assert f"few: {len(sizes)} classes, {sum(sizes)} samples" in out
    low, high = split["thresholds"]
    bounds = {"many": f"more than {high}", "medium": f"{low} to {high}", "few": f"fewer than {low}"}
    for group, text in bounds.items():
        assert re.search(rf"^{group}: .* samples \({text} of each class\)$", out, re.MULTILINE)
    assert split["sha256"] in out


def test_imported_split_is_the_exported_one_whatever_the_seed(raylt, tmp_path):
    file = tmp_path / "split.json"
    exported = json.loads(raylt("data", "data.seed=5", "--export", file, "--format", "json").out)
    imported = json.loads(raylt("data", "--import", file, "--format", "json").out)
    drawn = json.loads(raylt("data", "--format", "json").out)
    assert imported == exported
    assert drawn["sha256"] != exported["sha256"]


@pytest.mark.slow
def test_split_of_a_run_can_be_imported(raylt, finished):
    folder, (_, out, _) = finished
    imported = json.loads(raylt("data", *SMALL, "--import", folder / "split.json", "--format", "json").out)
    assert imported["sha256"] == json.loads(out)["split_sha256"]


def test_methods_are_listed_with_default_range_and_source(raylt):
    code, out, _ = raylt("methods", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert listing["fedprox"]["fields"]["mu"] == {
        "default": 0.01,
        "range": "[0.0001, 1] log",
        "source": "weight of the proximal term, Eq. 2",
        "stage": None,
    }
    assert listing["sfd"]["fields"]["aligner"]["stage"] == "finish"
    assert listing["fedavg"]["paper"] == "McMahan et al., AISTATS 2017"
    table = raylt("methods").out
    assert all(name in table for name in listing)
    assert [table.index(f"{group}: ") for group in GROUPS] == sorted(table.index(f"{group}: ") for group in GROUPS)
    assert listing["fednova"]["group"] == "aggregation"
    assert listing["ditto"]["group"] == "personal"
    assert "privileged: labelled images" in " ".join(table.split())


def test_the_costs_of_a_method_are_sums_over_the_calls_of_a_round():
    def call(when, up, down, trained, read, **sends):
        return {"when": when, "up": up, "down": down, "trained": trained, "read": read, "sends": sends}

    calls = [
        call("join", 512, 512, 0, 1, mean="total"),
        call("round", 1024, 4096, 1, 0, model="mean", loss="each"),
        call("round", 2048, 1024, 0.5, 2, classes="total"),
        call("finish", 6144, 512, 0, 1, statistics="total"),
    ]
    assert _costs({"calls": calls, "cost": 1.7}) == [
        "model; loss of each; classes",
        "3.0 KiB",
        "5.0 KiB",
        "1.5 trained, 2 read",
        "1.7",
        "statistics (6.0 KiB)",
    ]


@pytest.mark.slow
def test_one_method_is_shown_with_its_fields_what_it_sends_and_what_it_costs(raylt):
    assert "measured with resnet8, images of 8x8x3 and 10 classes" in raylt("methods", "fedavg").out
    out = raylt("methods", "fedncm").out
    assert "statistics" in out
    assert "Departures" in out
    assert re.search(r"finish +statistics +classes +10.1 KiB +4.7 MiB +1 read", out)
    one = json.loads(raylt("methods", "ditto", "--model", "small", "--format", "json").out)
    assert one["ditto"]["calls"][0]["trained"] == 2
    assert one["ditto"]["cost"] == 2
    assert "local.epochs=1: 2.0 times FedAvg's" in raylt("methods", "ditto", "--model", "small").out
    assert "finish on" in raylt("methods", "ccvr", "--model", "small").out
    code, _, err = raylt("methods", "fedncmm")
    assert code == 2
    assert "Did you mean fedncm?" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "small", "--image", "8x8"], "--image: is not HEIGHTxWIDTHxCHANNELS (8x8)"),
        (["--model", "small", "--image", "99999x99999x3"], "--image: one image of each of 10 classes has more than"),
        (
            ["--model", "small", "--image", f"{'9' * 5000}x8x3"],
            "--image: one image of each of 10 classes has more than",
        ),
        (["--model", "small", "--classes", "1000000000"], "--image: one image of each of 1000000000 classes has more"),
        (["--model", "resnet9"], "(resnet9)"),
        (["--model", "cnn"], "16x16 (8x8)"),
    ],
)
def test_what_methods_cannot_be_measured_with_is_refused(raylt, arguments, problem):
    code, _, err = raylt("methods", "fedavg", *arguments)
    assert code == 2
    assert problem in err
    assert len(err.splitlines()) == 1


def test_settings_are_listed_with_default_and_meaning(raylt):
    code, out, _ = raylt("settings", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert list(listing) == [key for key, _ in settings()]
    assert listing["data.alpha"]["default"] == 0.5
    assert "Dirichlet" in listing["data.alpha"]["what"]
    table = raylt("settings").out
    assert all(key in table for key in listing)


def test_settings_say_which_values_they_take(raylt):
    listing = json.loads(raylt("settings", "--format", "json").out)
    assert listing["federation.batchnorm"]["allowed"] == "average, local"
    assert listing["local.momentum"]["allowed"] == "a number >= 0 and < 1"
    assert listing["data.min_size"]["allowed"] == "a whole number >= 0 or null"
    assert listing["resources.actors"]["allowed"] == "a whole number >= 1 or auto"
    assert listing["method"]["default"] is None
    assert all(name in listing["model"]["allowed"] for name in MODELS)
    assert all(name in listing["data.source"]["allowed"] for name in NAMES)
    assert all(name in listing["augment"]["allowed"] for name in AUGMENTATIONS)
    table = raylt("settings").out
    assert "at most 10,000,000, and seeds at most 9,223,372,036,854,775,807." in " ".join(table.split())
    assert "= none" in table
    assert "[number, number] or null" in " ".join(table.split())


def test_recipes_are_listed_with_what_they_are(raylt):
    listing = json.loads(raylt("recipes", "--format", "json").out)
    assert "handwritten digits" in listing["demo"]["what"]
    assert all(entry["what"] and Path(entry["path"]).is_file() for entry in listing.values())
    assert "sfd/cifar10_if100_alpha0.05_k10" in raylt("recipes").out


def test_version_is_said(raylt):
    from importlib.metadata import version

    assert raylt("--version") == (0, f"raylt {version('raylt')}\n", "")


def test_page_of_methods_has_all_of_them_and_is_measured_for_one_model(raylt, tmp_path):
    for more in (["sfd"], ["--model", "cnn"], ["--classes", "100"], ["--format", "json"]):
        code, _, err = raylt("methods", *more, "--page", tmp_path / "methods.md")
        assert code == 2
        assert "[config.conflict]: --page: " in err
        assert not (tmp_path / "methods.md").exists()


@pytest.mark.slow
def test_words_longer_than_their_column_are_folded_not_cut(raylt):
    out = raylt("settings").out
    assert "…" not in out
    assert "…" not in raylt("methods", "clip2fl").out


def test_a_file_whose_path_holds_an_equals_sign_is_a_file(raylt, tmp_path):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "best.yaml").write_text("data: {clients: 7}")
    code, out, _ = raylt("data", folder / "best.yaml", "--format", "json")
    assert code == 0
    assert len(json.loads(out)["clients"]) == 7


def test_every_command_is_in_one_panel_of_the_help(raylt):
    from raylt.cli.main import PANELS, app

    out = raylt("--help").out
    listed = [line.split()[1] for line in out.splitlines() if re.match(r"│ [a-z]", line)]
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    names += [group.name for group in app.registered_groups]
    assert sorted(listed) == sorted(names)
    assert [panel for panel in PANELS if f" {panel} " in out] == list(PANELS)


def test_departures_of_a_method_fill_the_terminals_width():
    console = Console(width=80, record=True, file=io.StringIO())
    notes = (
        "A method.\n\n[1] A departure whose first line is as long as the project's, which is wider than a terminal\n"
        "    and goes on.\n[2] Another.\nA paragraph\nof two lines."
    )
    for part in reflowed(notes):
        console.print(part)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "A method.",
        "",
        "[1] A departure whose first line is as long as the project's, which is wider",
        "    than a terminal and goes on.",
        "[2] Another.",
        "A paragraph of two lines.",
    ]


def test_settings_of_the_method_name_every_method(raylt):
    code, out, _ = raylt("settings", "method")
    assert code == 0
    assert set(METHODS) <= set(re.findall(r"\w+", out))
    assert "raylt methods NAME" in out
    assert list(json.loads(raylt("settings", "method", "--format", "json").out)) == ["method"]


def test_a_section_of_settings_is_readable_at_80_columns(raylt, monkeypatch):
    for console in (options.out, options.err):
        monkeypatch.setattr(console, "_width", 80)
    code, out, _ = raylt("settings", "local")
    listed = [key for key, _ in settings() if key.startswith("local.")]
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    starts = [line.split()[0] for line in lines if line.startswith("local.")]
    assert starts == listed
    assert "data.alpha" not in out
    meanings = [line[31:] for line in lines[2:] if len(line) > 31]
    assert max(map(len, meanings)) > 40  # the second column is as wide as the terminal allows


def test_every_default_is_shown_whole_where_it_fits(raylt):
    out = raylt("settings", "local.lr").out
    assert "= 0.05" in out
    assert list(json.loads(raylt("settings", "local.lr", "--format", "json").out)) == ["local.lr"]


def test_a_section_that_is_none_is_refused_with_the_nearest(raylt):
    refused(raylt("settings", "locl"), "[config.unknown-name]", "Did you mean local?")


@pytest.mark.parametrize(("words", "expected"), [("raylt re", "resume"), ("raylt run --fl", "--fleet")])
def test_a_shell_completes_commands_and_options(words, expected):
    environment = {
        **os.environ,
        "_RAYLT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    script = "import sys; sys.argv = ['raylt']; from raylt.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert expected in done.stdout.split(), done.stderr


def test_the_completion_of_a_shell_can_be_shown():
    script = "import sys; sys.argv = ['raylt', '--show-completion', 'bash']; from raylt.cli.main import main; main()"
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "_RAYLT_COMPLETE=complete_bash" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_list_of_runs_does_not_wait_for_torch(finished):
    script = (
        f"import sys; sys.argv = ['raylt', 'ls', {str(finished[0].parent)!r}]\n"
        "from raylt.cli.main import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "one" in done.stdout
    assert done.stdout.endswith("False\n")
