"""Runs, studies, comparisons and configs as a notebook shows them, and errors in terms of Python calls."""

import pytest
from refusals import refused
from small_runs import make_run, make_tiny_run

import raylt
from raylt.errors import CheckpointError, ConfigError, at_the_shell, spoken
from raylt.studies.study import of_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("shown"), "fedavg")


def test_a_run_is_shown_as_its_summary(run, tmp_path):
    text = run._repr_html_()
    assert "accuracy, last" in text
    assert f"run folder: {run.folder}" in text
    assert f"n = {run.summary['tests']['images']}" in text
    assert "missing" in raylt.Run(tmp_path / "none")._repr_html_()


def test_a_configuration_is_shown_by_what_differs_from_the_defaults(run):
    text = run.config._repr_html_()
    assert "data.clients" in text
    assert "federation.participation" not in text


def test_a_study_and_its_comparison_are_tables(run):
    study = of_runs([run.folder])
    assert repr(study) == "Study('runs', 1 of 1 run done)"
    assert "1 done" in study._repr_html_()
    assert f"{100 * run.summary['accuracy']['last']:.2f}" in study._repr_html_()
    comparison = study.compare()
    assert repr(comparison) == "Comparison('accuracy', 1 rows, arms fedavg)"
    text = comparison._repr_html_()
    assert "balanced test set" in text
    assert "judged on: n = " in text


def test_runs_of_clients_own_models_are_compared_by_these(run, tmp_path):
    personal = make_tiny_run(tmp_path, "fedper", "federation.rounds=1")
    shown = personal.summary["shown"]
    [row] = of_runs([personal.folder]).compare().rows
    assert shown["figure"] == "local"
    assert row.values == {personal.config.seed: shown["last"]}
    assert of_runs([run.folder, personal.folder]).definition.measure == "accuracy"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["curves", "data", "clients", "classes", "confusion"])
def test_plots_are_figures_that_a_notebook_shows(run, tmp_path, kind):
    figure = run.plot(kind, str(tmp_path / f"{kind}.svg"))
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / f"{kind}.svg").read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("clusters", ("method=mupfl", "method.m=5", "method.tau=2", "method.matching_steps=2")),
        (
            "features",
            ("method=sfd", "method.rf_dim=60", "method.m_min=80", "method.m_max=90", "method.retrain_epochs=2"),
        ),
    ],
)
def test_pictures_of_one_method_are_figures_too(run, tmp_path, kind, settings):
    drawn = make_run(tmp_path, kind, *settings, "federation.rounds=3").plot(kind, str(tmp_path / "it.pdf"))
    assert drawn._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "it.pdf").is_file()
    with refused("run.wrong-kind", CheckpointError):
        run.plot(kind)


def test_studies_and_comparisons_are_drawn_too(run, tmp_path):
    study = of_runs([run.folder])
    assert study.plot(["accuracy"], path=str(tmp_path / "a.pdf")).axes
    assert study.compare().plot(str(tmp_path / "b.png")).axes
    assert {path.name for path in tmp_path.iterdir()} == {"a.pdf", "b.png"}


def test_a_picture_that_there_is_not_is_refused(run):
    with refused("config.unknown-name", ConfigError, key="kind", value="pie"):
        run.plot("pie")


def test_errors_name_the_python_call_or_the_command(run, tmp_path):
    unfinished = make_tiny_run(tmp_path, "fedavg", name="open")
    (unfinished.folder / "summary.json").unlink()
    call = f"raylt.resume({str(unfinished.folder)!r})"
    with pytest.raises(CheckpointError) as caught:
        _ = unfinished.summary
    assert call in str(caught.value)
    with at_the_shell(), pytest.raises(CheckpointError) as caught:
        _ = unfinished.summary
    assert f"raylt resume {unfinished.folder}" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        of_runs([run.folder]).compare("local", at="best")
    assert "at='last'" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        run.plot("predictions")
    assert "run.plot('clients')" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "shell", "python"),
    [
        ({"what": "empty.yaml"}, "recipe:demo", "raylt.run('sfd')"),
        ({"what": "fedavg", "data": "nothing"}, "--plugin FILE", "raylt.register"),
        ({"what": "fedavg", "data": {"partition": "nothing"}}, "--plugin FILE", "raylt.register"),
        ({"what": "fedavg", "model": "nothing"}, "--plugin FILE", "raylt.register"),
    ],
)
def test_refusals_before_a_run_name_the_call_too(tmp_path, monkeypatch, settings, shell, python):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("seed: 1\n")

    def message() -> str:
        with pytest.raises(ConfigError) as caught:
            raylt.run(settings["what"], tmp_path, fleet="local", quiet=True, **rest)
        return str(caught.value)

    rest = {key: value for key, value in settings.items() if key != "what"}
    assert python in message()
    with at_the_shell():
        assert shell in message()


def test_words_are_those_of_the_shell_only_inside_a_command():
    assert spoken("a", "b") == "b"
    with at_the_shell():
        with at_the_shell():
            assert spoken("a", "b") == "a"
        assert spoken("a", "b") == "a"
    assert spoken("a", "b") == "b"
