"""The class that Ray Tune trains: its figures, its checkpoints, and examples with Ray's own algorithms."""

import importlib.util
import json
from pathlib import Path
from typing import ClassVar

import PIL.Image
import pytest
from refusals import refused

import raylt
from raylt.config import load
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from tune.plan import with_validation

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = ["data.clients=4", "data.imbalance=5", "federation.rounds=4", "local.epochs=1", "resources.actors=1"]

pytestmark = pytest.mark.slow


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures(result):
    return {key: result[key] for key in ("accuracy", "many", "medium", "local", "round", "loss") if key in result}


@pytest.mark.parametrize("method", ["fedprox", "ccvr"])
def test_a_trial_gives_the_figures_of_the_run_and_continues_to_the_same_bits(ray_session, tmp_path, method):
    from tune import model_of, trainable

    config = load(None, [f"method={method}", "evaluation.every=2", *SETTINGS])
    run = raylt.run(with_validation(config), out=tmp_path, name="run", fleet="local", quiet=True)
    kind = trainable(config)
    straight = kind(config={"local": {"lr": 0.05}})  # the default in nested form
    halfway = figures(straight.train())
    assert halfway["round"] == 2
    in_middle = run.reports[1]["figures"]["validation"]["accuracy"]
    assert (halfway["accuracy"] == in_middle) == (method == "fedprox")  # ccvr is judged with its last phase
    saved = straight.save(str(tmp_path / "saved"))
    end = straight.train()
    straight.save(str(tmp_path / "end"))
    straight.stop()
    assert end["done"]
    assert end["accuracy"] == run.reports[-1]["figures"]["validation"]["accuracy"]

    continued = kind(config={"local.lr": 0.05})
    continued.restore(saved)
    assert figures(continued.train()) == figures(end)
    continued.stop()

    from ray.tune import Checkpoint

    model = model_of(Checkpoint.from_directory(str(tmp_path / "end")))
    images = run.task.test.x[:20]
    assert model.predict(images).labels.tolist() == run.model().predict(images).labels.tolist()


def test_a_checkpoint_of_a_trial_with_other_fixed_settings_is_refused(ray_session, tmp_path):
    from tune import trainable

    kind = trainable(load(None, ["method=fedprox", *SETTINGS]))
    one = kind(config={})
    one.train()
    saved = one.save(str(tmp_path / "saved"))
    one.stop()
    other = kind(config={"data.alpha": 0.1})
    with refused("search.fixed-setting", ConfigError, key="data.alpha"):
        other.restore(saved)
    other.stop()


class Looking(FedAvg):
    """FedAvg that refuses every task, and names the number of dimensions of its samples."""

    name: ClassVar[str] = "looking"

    def prepare(self, task, config, model):
        raise ConfigError(str(task.test.x.ndim), code="method.wrong-argument")


def test_a_method_sees_the_images_before_they_are_encoded(ray_session, tmp_path):
    from tune import trainable

    raylt.register(Looking)
    trial = trainable(load(None, ["method=looking", "trainable=classifier", f"data.root={tmp_path}", *SETTINGS]))
    with pytest.raises(ConfigError, match=r"^4$"):
        trial(config={}).train()


def test_a_trial_has_as_many_clients_as_its_images_have_owners(ray_session, tmp_path):
    from tune import trainable

    images = [PIL.Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in range(0, 240, 10)]
    for place, image in enumerate(images):
        folder = tmp_path / "shops" / ("Graz", "Linz", "Wien")[place % 3] / ("boot", "bag")[place % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{place}.png")
    settings = ["federation.rounds=1", "local.epochs=1", "resources.actors=1"]
    config = load(None, [f"data.source=folder:{tmp_path / 'shops'}", "data.size=8", "method=fedprox", *settings])
    assert config.data.clients is None
    trial = trainable(config)(config={})
    assert trial.train()["round"] == 1
    trial.save(str(tmp_path / "saved"))
    trial.stop()
    [saved] = (tmp_path / "saved").rglob("settings.json")
    assert json.loads(saved.read_text())["data"]["clients"] == 3


def test_a_trial_larger_than_the_cluster_is_refused(ray_session):
    from tune import trainable

    with refused("cluster.too-small", ConfigError):
        trainable(load(None, ["method=fedprox", *SETTINGS, "resources.cpus_per_client=9"]))


@pytest.mark.soak
def test_population_based_training_changes_the_learning_rate_of_a_trial(ray_session, tmp_path):
    results = example("population_based").tune_population(tmp_path)
    assert not results.errors
    assert [result.metrics["round"] for result in results] == [6, 6]
    # the worse trial has taken over the better one's model
    assert all(result.config["local.lr"] > 0.0005 for result in results)
    assert list(tmp_path.glob("population/pbt_global.txt"))


def test_bohb_continues_the_best_trials_of_a_bracket(ray_session, tmp_path):
    pytest.importorskip("hpbandster")
    pytest.importorskip("ConfigSpace")
    results = example("bayesian_hyperband").search_brackets(tmp_path, 4, 9)
    assert not results.errors
    by_round = {}
    for result in results:
        by_round.setdefault(result.metrics["round"], []).append(result.metrics["accuracy"])
    assert sum(map(len, by_round.values())) == 4
    assert set(by_round) <= {1, 3, 9}
    assert 9 in by_round
    assert len(by_round) > 1
    assert results.get_best_result().metrics["round"] == 9


def test_a_search_with_two_objectives_ends_with_a_front_and_its_picture(ray_session, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["two_objectives.py", str(tmp_path), "--trials", "4", "--rounds", "2"])
    example("two_objectives").main()
    assert "few-shot" in capsys.readouterr().out
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
