"""Unusable input gives one line and exit code 2, and leaves no files."""

import re
import subprocess
import sys

import pytest
from commands import SMALL, Outcome, copied, damage, refused

SCENES = "data.source=shapes", "data.partition=iid", "data.imbalance=1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["federation.round=2"], ["[config.unknown-key]: federation.round: ", "federation.rounds"]),
        (["method=fedprix"], ["'fedprix'", "id you mean fedprox?"]),
        (["method=fedavg", "method.mu=1"], ["method.mu"]),
        (["data.source=npz:missing.npz"], ["missing.npz", "no such file"]),
        (["data.source=digit"], ["'digit'", "Did you mean digits?"]),
        (["data.source=cifar10"], ["cifar10", "data.download=true"]),
        (["data.imbalance=0.5"], ["[config.out-of-range]: data.imbalance: ", "(0.5)", ">= 1"]),
        (["data.alpha=0"], ["[config.out-of-range]: data.alpha: ", "(0)", "> 0"]),
        (["method=sfd", *SCENES, "model=lraspp"], ["[config.conflict]: method: ", "(sfd)", "raylt methods"]),
        (["method=bpfed", *SCENES, "model=lraspp"], ["[config.conflict]: method: ", "(bpfed)"]),
        (["method=fedavg", *SCENES], ["[config.conflict]: model: ", "(small)", "raylt settings"]),
        (["method=fedavg", "model=lraspp"], ["model: lraspp"]),
        (
            ["method=fedavg", "model=lraspp", "data.source=shapes"],
            ["data.partition", "(dirichlet)", "data.partition=classes"],
        ),
        (["model=resnet9"], ["[config.unknown-name]: model: ", "'resnet9'", "resnet8"]),
        (["augment=crop"], ["[config.unknown-name]: augment: ", "'crop'", "crop_flip"]),
        (["data.clients=5000"], ["data.clients", "training samples (5000)", "Lower"]),
        (["data.partition=creff", "data.clients=5"], ["data.clients", "(5)", "at least 10"]),
        (["absent.yaml"], ["[file.not-found]: absent.yaml: "]),
        (["seed"], ["[file.not-found]: seed: "]),
        (["seed=0", "rounds"], ["'rounds'", "key=value"]),
        (["--name", "a/b"], ["name: ", "a/b", "out"]),
        (["--name", ".."], ["name: ", "'..'"]),
        (["recipe:sdf/x"], ["[config.unknown-name]: recipe:sdf/x: ", "raylt recipes"]),
    ],
)
def test_run_refuses(raylt, tmp_path, arguments, named):
    method = [] if any("method" in text for text in arguments) else ["method=fedavg"]
    refused(raylt("run", *arguments, *method, "--fleet", "local"), *named)
    assert list(tmp_path.iterdir()) == []  # no run folder is left behind


@pytest.mark.parametrize("command", ["run", "plan", "tune"])
def test_a_method_must_be_named_as_soon_as_anything_is(raylt, command):
    refused(raylt(command, "federation.rounds=3"), "[config.missing]: method: ", "method=sfd", "raylt methods")


@pytest.mark.parametrize(
    ("without", "named"),
    [(["y_train"], ["has no y_train."]), (["x_test", "class_names"], ["has no x_test, class_names."])],
)
def test_npz_without_some_arrays_is_refused(raylt, npz, without, named):
    refused(raylt("run", "method=fedavg", f"data.source=npz:{npz(*without)}", "--fleet", "local"), "arrays.npz", *named)


def test_existing_run_folder_is_refused_and_left_alone(raylt, finished):
    folder, _ = finished
    before = sorted(folder.rglob("*"))
    refused(
        raylt("run", *SMALL, "--fleet", "local", "--out", folder.parent, "--name", "one"),
        "exists already",
        f"raylt resume {folder}",
    )
    assert sorted(folder.rglob("*")) == before


def test_resume_with_other_settings_shows_each_difference(raylt, finished):
    folder, _ = finished
    refused(
        raylt("resume", folder, "local.lr=0.1", "seed=3", "method.mu=2", "--fleet", "local"),
        "local.lr: 0.05 -> 0.1",
        "seed: 0 -> 3",
        "method.mu: 0.01 -> 2",
        "resources.*",
    )


def test_resume_of_what_is_no_run_is_refused(raylt, tmp_path):
    refused(raylt("resume", tmp_path, "--fleet", "local"), "not a run folder")
    refused(raylt("resume", tmp_path / "absent", "--fleet", "local"), "absent: not a run folder")


def test_resume_is_refused_when_all_checkpoints_are_damaged(raylt, finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    (folder / "summary.json").unlink()  # as if the run had been killed before its end
    for step in ("000001", "000002"):
        damage(folder / "checkpoints" / step)
    refused(raylt("resume", folder, "--fleet", "local"), "000002 is damaged", "000001 is damaged", "Start a new run")


def test_option_or_command_that_does_not_exist_is_refused(raylt):
    refused(raylt("run", "--format", "xml"), "--format", "'xml'", "'table', 'json'")
    refused(raylt("run", "--fleet", "slurm"), "--fleet", "'slurm'")
    refused(raylt("run", "--bogus"), "--bogus")
    refused(raylt("train"), "'train'")
    refused(raylt("resume"), "RUN")


def test_split_that_cannot_be_written_or_read_is_refused(raylt, tmp_path):
    refused(raylt("data", "--export", tmp_path / "absent" / "split.json"), "--export", "absent")
    refused(raylt("data", "--import", tmp_path / "absent.json"), "absent.json", "exists")
    (tmp_path / "other.json").write_text("{}")
    refused(raylt("data", "--import", tmp_path / "other.json"), "other.json", "no client")


@pytest.mark.parametrize(
    ("work", "arguments", "option"),
    [
        ("raylt.privacy.attack.attack", ["attack", "RUN", "--picture", "no/pictures"], "--picture"),
        ("raylt.cli.method_page.entries", ["methods", "--page", "no/page.md"], "--page"),
        ("raylt.data.task.build_task", ["data", "--export", "."], "--export"),
        ("raylt.data.task.build_task", ["plot", "data", "--picture", "no/data.png"], "--picture"),
        ("raylt.plots.clients.compare_clients", ["plot", "clients", "RUN", "--picture", "no/c.png"], "--picture"),
        ("raylt.studies.report.html.write_report", ["report", "RUN", "--to", "."], "--to"),
        ("raylt.studies.papers.verdicts.verdicts", ["verdicts", "RUN", "--page", "no/page.md"], "--page"),
        ("raylt.runs.run.Run.model", ["export", "RUN", "--out", "no/m.safetensors"], "--out"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    raylt, finished, monkeypatch, work, arguments, option
):
    def never(*values, **options):
        raise AssertionError(f"{work} was called")

    monkeypatch.setattr(work, never)
    arguments = [str(finished[0]) if word == "RUN" else word for word in arguments]
    refused(raylt(*arguments), f"[file.unwritable]: {option}: ", "cannot be written (")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["check", "absent.py"], "[file.not-found]: absent.py: "),
        (["ls", "FILE"], "[file.not-found]: FILE: is not a folder. "),
        (["verify", "FILE"], "[file.malformed]: FILE: is not a folder, "),
        (["attack", "RUN", "--outside", "nothing"], "[config.unknown-name]: --outside: "),
        (["ls", "--address="], "[cluster.bad-address]: --address '': "),
        (["plan", "method=fedavg", "--address="], "[cluster.bad-address]: --address '': "),
        (["compare", "RUN", "--level", "nan"], "[command.usage]: --level: is not a number (nan). "),
        (["run", "method=fedavg", "--name="], "[config.out-of-range]: --name: "),
        (["data", "--clear-cache="], "[data.unknown-cache]: --clear-cache: "),
    ],
)
def test_a_refusal_names_the_option_or_the_file_of_its_command(
    raylt, finished, tmp_path, monkeypatch, arguments, start
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "notes.txt"
    file.touch()
    places = {"FILE": str(file), "RUN": str(finished[0])}
    ended = raylt(*(places.get(word, word) for word in arguments))
    refused(ended, start.replace("FILE", str(file)))


@pytest.mark.slow
def test_address_where_no_cluster_answers_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "raylt", "run", "--address", "127.0.0.1:1", "--name", "one"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert "--address 127.0.0.1:1" in last
    assert "(Connection refused)" in last
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_error_of_a_real_process_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "raylt", "run", "data.alpha=0"], capture_output=True, text=True, cwd=tmp_path
    )
    refused(Outcome(done.returncode, done.stdout, done.stderr), "[config.out-of-range]: data.alpha: ")


def test_debug_shows_the_traceback_anywhere_on_the_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "raylt", "--debug", "run", "data.alpha=0"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("raylt.errors.ConfigError: data.alpha: ")


@pytest.mark.parametrize(
    "settings",
    [
        ["method=rucr", "privacy.epsilon=1"],
        ["method=scaffold", "privacy.update_epsilon=5", "federation.participation=1"],
        ["method=la", "method.prior=global", "privacy.update_epsilon=5", "federation.participation=1"],
        ["method=fedavg", "federation.secure=true", "federation.robust=median"],
        ["method=mupfl", "federation.secure=true"],
        ["method=local", "federation.robust=median"],
        ["method=fedavg", "federation.sampling=poisson", "federation.over_select=0.5"],
        ["method=fednova", "local.optimiser=adam"],
        ["method=ratioloss", "federation.rounds=2"],
        ["method=fedavg", "model=cnn"],
        ["method=fedavg", "data.clients=5000"],
    ],
)
def test_plan_and_a_studys_dry_run_refuse_what_run_refuses(raylt, tmp_path, settings):
    planned = raylt("plan", *settings)
    refused(planned)
    done = raylt("run", *settings, "--fleet", "local")
    assert (done.code, done.err.splitlines()[-1]) == (2, planned.err.strip())
    arm = "\n".join(f"    {text.replace('=', ': ', 1)}" for text in settings)
    file = tmp_path / "one.yaml"
    file.write_text(f"arms:\n  fits: fedavg\n  only:\n{arm}\n")
    previewed = raylt("study", file, "--dry-run")
    refused(previewed)
    assert previewed.err.strip() == planned.err.strip()


def test_a_missing_argument_with_choices_is_one_line(raylt):
    ended = raylt("new")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert "[command.usage]" in line
    assert "example, study, method, cluster" in line


def test_a_command_of_ten_thousand_letters_is_a_short_line(raylt):
    ended = raylt("a" * 10_000)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert len(line) < 2100


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["follow", "run", "--every", "inf"], "--every: is too large (inf). Give a number >= 0.1 and <= 86400."),
        (["tune", "--samples", "0"], "--samples: is too small (0). Give a number >= 1."),
        (["compare", "runs", "--level", "2"], "--level: is too large (2). Give a number >= 0.5 and <= 0.999."),
        (["compare", "runs", "--target", "-1"], "--target: is too small (-1). Give a number >= 0 and <= 1."),
        (["compare", "runs", "--level", "most"], "--level: is not a number (most). Give a number >= 0.5 and <= 0.999."),
        (["plot", "predictions", "r", "--image", "x"], "--image: is not a whole number (x). Give what"),
    ],
)
def test_an_option_that_is_no_such_number_is_named_with_its_value(raylt, arguments, problem):
    ended = raylt(*arguments)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error [command.usage]: {problem}")


def test_a_current_folder_that_was_removed_is_a_line(raylt, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = raylt("methods")
    assert code == 2
    assert err.startswith("error [file.not-found]: current folder: "), err


def test_nodes_and_the_address_of_a_cluster_exclude_each_other(raylt):
    ended = raylt("plan", "method=fedavg", "--nodes", "2x8cpu", "--address", "127.0.0.1:1")
    refused(ended)
    assert "Leave one out" in ended.err


@pytest.mark.parametrize(
    ("setting", "most"), [("seed", "9,223,372,036,854,775,807"), ("federation.rounds", "10,000,000")]
)
def test_a_number_beyond_a_bound_that_no_listing_shows_is_told_the_bound(raylt, setting, most):
    ended = raylt("plan", "method=fedavg", f"{setting}={10**20}")
    refused(ended)
    assert f"at most {most}." in ended.err


@pytest.mark.parametrize("arguments", [["plot", "kurves"], ["lss"], ["run", "--flet", "local"]])
def test_a_misspelt_command_is_one_line_of_whole_sentences(raylt, arguments):
    ended = raylt(*arguments)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert re.search(r"[^.?][.?] Give what .*--help lists\.$", line), line
