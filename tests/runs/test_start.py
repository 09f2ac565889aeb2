"""`raylt.run`: its argument, settings and callbacks."""

from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import raylt
from raylt.config import Config, load
from raylt.errors import CheckpointError, ConfigError, RayltError, UnknownMethod
from raylt.methods.fedprox import FedProx
from raylt.runs.start import configure

SMALL = {"rounds": 2, "clients": 3, "epochs": 1}


# the first argument


@pytest.mark.parametrize(
    "what", ["fedprox", FedProx(mu=0.01), Config(method="fedprox"), Config(method={"name": "fedprox"})]
)
def test_a_method_by_name_or_value_and_a_configuration_are_the_same(what):
    assert configure(what, (), {"mu": 0.01}) == load(None, ["method=fedprox", "method.mu=0.01"])


def test_a_file_by_its_path_and_a_recipe_by_its_name(tmp_path):
    file = tmp_path / "it.yaml"
    file.write_text("method: {name: fedprox, mu: 3}\nlocal: {lr: 0.2}\n")
    assert configure(file) == configure(str(file)) == load(file)
    assert configure(file, (), {"rounds": 5}) == load(file, ["federation.rounds=5"])
    assert configure(file, (), {"method": "fedavg"}).method == {"name": "fedavg"}
    assert configure("recipe:demo") == load("recipe:demo")


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("fedprix", UnknownMethod, "fedprox"),
        ("absent.yaml", ConfigError, r"absent\.yaml"),
        (Path("absent"), ConfigError, "absent"),
        ("configs/absent", ConfigError, "configs/absent"),
        ("recipe:dmo", ConfigError, "recipe:demo"),
        (3, ConfigError, "recipe:NAME"),
        (FedProx, ConfigError, r"FedProx\(\)"),
    ],
)
def test_what_cannot_be_run_is_refused(what, error, message, tmp_path):
    with pytest.raises(error, match=message):
        raylt.run(what, out=tmp_path, fleet="local")
    assert list(tmp_path.iterdir()) == []


# settings


def test_settings_are_sections_short_names_and_fields_of_the_method():
    config = configure(
        "fedprox",
        ["evaluation.every=2"],
        {
            "data": "cifar10",
            "rounds": 7,
            "seed": 3,
            "model": "resnet8",
            "local": {"lr": 0.1, "batch": 64},
            "alpha": 0.2,
            "mu": 0.5,
        },
    )
    assert config == load(
        None,
        [
            "method=fedprox",
            "method.mu=0.5",
            "data.source=cifar10",
            "data.alpha=0.2",
            "federation.rounds=7",
            "seed=3",
            "model=resnet8",
            "local.lr=0.1",
            "local.batch=64",
            "evaluation.every=2",
        ],
    )


def test_sections_and_overrides_may_be_mappings():
    config = configure(
        "fedprox",
        {"local.lr": 0.1, "data.root": Path("there")},
        {"data": {"source": "cifar10", "seed": 4}, "method": {"mu": 0.5}},
    )
    assert config == load(
        None,
        ["method=fedprox", "method.mu=0.5", "data.source=cifar10", "data.seed=4", "local.lr=0.1", "data.root=there"],
    )


def test_overrides_as_a_mapping_are_those_as_a_list(tmp_path):
    fedprox = load(None, ["method=fedprox", "method.mu=0.5"])
    assert configure("sfd", {"method.mu": 0.5, "method": "fedprox"}) == fedprox
    assert configure("sfd", {"method": {"name": "fedprox", "mu": 0.5}}) == fedprox
    assert configure("recipe:demo", {"method.name": "fedprox"}).method == {"name": "fedprox"}
    (tmp_path / "f.yaml").write_text("method: fedavg\nlocal: {lr: 0.2, epochs: 5}")
    assert configure(tmp_path / "f.yaml", {"local": {"lr": 0.1}}).local.epochs == 5


def test_a_method_that_is_named_again_keeps_its_fields(tmp_path):
    assert configure("recipe:demo", ["method=sfd"]).method == configure("recipe:demo").method
    (tmp_path / "f.yaml").write_text("method: {name: fedprox, mu: 0.7}")
    assert configure(tmp_path / "f.yaml", ["method=fedprox"]).method == {"name": "fedprox", "mu": 0.7}
    assert configure(tmp_path / "f.yaml", ["method=fedavg"]).method == {"name": "fedavg"}


def test_a_configuration_with_values_of_numpy_is_taken():
    config = Config(method={"name": "pfedme", "steps": np.int64(2)})
    assert configure(config).method["steps"] == 2


def test_the_given_configuration_is_left_as_it_is():
    config = load(None, ["method=fedprox"])
    before = config.model_dump()
    assert configure(config, (), {"mu": 3, "data": {"seed": 9}}).data.seed == 9
    assert config.model_dump() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"round": 3}, r"^round\b.*rounds"),
        ({"zzzz": 3}, "^zzzz.*raylt settings"),
        ({"batch": 3}, r"^batch\b.*local\.batch.*evaluation\.batch"),
        ({"local": {"epoch": 3}}, r"local\.epoch\b.*local\.epochs"),
        ({"local": 3}, "^local.*3"),
        ({"data": 3}, "^data.*3"),
        ({"rounds": "many"}, r"federation\.rounds.*many"),
        ({"method": "fedavg", "mu": 3}, "^method.*fedprox and fedavg"),
        ({"overrides": ["rounds"]}, "key=value"),
        ({"fleet": "slurm"}, "^fleet.*slurm"),
        ({"name": "a/b"}, "^name.*a/b"),
        ({"data": "digit"}, "digits"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_and_leave_nothing(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        raylt.run("fedprox", out=tmp_path, **({"fleet": "local", "quiet": True} | settings))
    assert list(tmp_path.iterdir()) == []


def test_a_setting_and_a_field_of_the_same_name_are_distinguished():
    with pytest.raises(ConfigError, match=r"^alpha.*data\.alpha.*method\.alpha"):
        configure("bpfed", (), {"alpha": 0.3})
    config = configure("bpfed", (), {"data": {"alpha": 0.3}, "method": {"alpha": 0.4}})
    assert (config.data.alpha, config.method["alpha"]) == (0.3, 0.4)


# callbacks


class Diary(raylt.Callback):
    """Records the events of a run."""

    def __init__(self):
        self.events = []

    def on_start(self, folder, config, reports):
        self.events.append(("start", folder.name, config.federation.rounds, len(reports)))

    def on_step(self, report):
        self.events.append(("step", report.step))

    def on_end(self, summary):
        self.events.append(("end", None if summary is None else summary["rounds"]))


def test_callbacks_are_called_in_order(tmp_path, capsys):
    first, second = Diary(), Diary()
    run = raylt.run("fedavg", out=tmp_path, name="one", fleet="local", quiet=True, callbacks=[first, second], **SMALL)
    assert first.events == second.events == [("start", "one", 2, 0), ("step", 1), ("step", 2), ("end", 2)]
    assert capsys.readouterr() == ("", "")
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        raylt.run("fedavg", out=tmp_path, name="one", fleet="local")
    assert run.state == "done"


@pytest.mark.slow
def test_a_callback_that_raises_stops_the_run_which_can_go_on(tmp_path):
    class Impatient(Diary):
        def on_step(self, report):
            super().on_step(report)
            raise KeyboardInterrupt

    diary = Impatient()
    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", out=tmp_path, name="one", fleet="local", quiet=True, callbacks=[diary], **SMALL)
    assert diary.events == [("start", "one", 2, 0), ("step", 1), ("end", None)]
    run = raylt.Run.open(tmp_path / "one")
    assert run.state == "stopped"
    assert run.resume(fleet="local", quiet=True).summary["rounds"] == 2


def test_what_ended_a_run_is_heard_before_what_a_callback_says_of_its_end(tmp_path):
    class Down(Diary):
        def on_step(self, report):
            raise KeyboardInterrupt

        def on_end(self, summary):
            raise RayltError("tracker down")

    class Reader(Diary):
        def on_message(self, text, minor=False):
            self.events.append(("message", text))

    last = Reader()
    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", out=tmp_path, name="one", fleet="local", quiet=True, callbacks=[Down(), last], **SMALL)
    assert last.events[-2:] == [("end", None), ("message", "on_end failed: tracker down")]

    class Dead(Down):
        def on_message(self, text, minor=False):
            if text.startswith("at its end"):
                raise RayltError("still down")

    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", out=tmp_path, name="two", fleet="local", quiet=True, callbacks=[Dead()], **SMALL)


def test_a_run_shows_how_it_goes_unless_it_is_quiet(tmp_path, capsys):
    run = raylt.run("fedavg", out=tmp_path, fleet="local", **SMALL)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"fedavg on digits, run folder {run.folder}"
    # 1797 digits without 300 for the test
    assert lines[1].startswith("995 of 1,497 training images (66%) are left out: ")
    assert [line.split("  ")[0] for line in lines[2:]] == ["round 1/2", "round 2/2"]


def test_a_relative_folder_stays_valid_when_the_current_folder_changes(tmp_path, monkeypatch):
    class Moving(raylt.Callback):
        def on_step(self, report):
            monkeypatch.chdir(tmp_path)

    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    raylt.run("fedavg", out="runs", name="one", fleet="local", quiet=True, callbacks=[Moving()], **SMALL)
    run = raylt.Run.open("start/runs/one")
    monkeypatch.chdir("/")
    assert len(run.metrics) > 0
    assert run.folder == tmp_path / "start/runs/one"


# the user's own code


class Mine(FedProx):
    """A user's own method."""

    name = "mine_of_this_test"


class Unprepared(FedProx):
    name = "unprepared_of_this_test"

    def prepare(self, task, config, model):
        raise ValueError("no public images")


def test_an_exception_of_a_method_s_preparation_names_its_line_and_leaves_nothing(tmp_path):
    with refused("plugin.failed", ConfigError, key="method") as caught:
        raylt.run(Unprepared(), out=tmp_path, name="one", fleet="local", quiet=True, **SMALL)
    assert "ValueError: no public images (test_start.py:" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_method_of_ones_own_runs_as_a_value_and_is_read_again(tmp_path):
    run = raylt.run(Mine(mu=0.5), out=tmp_path, name="one", fleet="local", quiet=True, **SMALL)
    assert run.summary["method"] == "mine_of_this_test"
    assert raylt.Run.open(tmp_path / "one").method == Mine(mu=0.5)


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"callbacks": raylt.Callback}, "callbacks", repr(raylt.Callback)),
        ({"callbacks": [print]}, "callbacks", repr(print)),
        ({"callbacks": "abc"}, "callbacks", "'a'"),
        ({"name": 5}, "name", 5),
        ({"out": None}, "out", "None"),
        ({"overrides": "local.lr=0.2"}, "overrides", "local.lr=0.2"),
        ({"method": {"name": "fedavg"}}, "method", "fedavg"),
        ({"method": "fedavg"}, "method", "fedavg"),
        ({"mu": 0.1, "method": {"mu": 0.2}}, "method.mu", 0.1),
        ({"lr": 0.1, "local": {"lr": 0.2}}, "local.lr", 0.1),
    ],
)
def test_arguments_of_a_wrong_kind_or_given_twice_are_refused(settings, key, value, tmp_path):
    with pytest.raises(ConfigError) as caught:
        raylt.run("fedprox", data="digits", fleet="local", quiet=True, **{"out": tmp_path / "runs"} | settings)
    assert (caught.value.details["key"], caught.value.details["value"]) == (key, value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "call",
    [
        raylt.Run,
        raylt.Run.open,
        raylt.Study.open,
        raylt.compare_clients,
        raylt.export,
        raylt.load_config,
        raylt.load_model,
        raylt.resume,
        raylt.study,
        lambda value: raylt.branch(value, ["method=posthoc"]),
        lambda value: raylt.compare_clients([value]),
        lambda value: raylt.study({}, value),
    ],
)
@pytest.mark.parametrize("value", [5, b"run"])
def test_what_is_neither_a_run_nor_a_path_is_refused(call, value):
    with pytest.raises(RayltError):
        call(value)
