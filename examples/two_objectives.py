"""Search for accuracy on the clients' own class mix and on rare classes at once, with Optuna in Ray Tune.

    python two_objectives.py results

Logit adjustment (la) moves decisions towards rare classes. The stronger it is, the more accuracy it costs on frequent
classes, which most images belong to. So there is no best trial, but a Pareto front of trials. The script prints its
trials and draws them in results/pareto.png.
"""

import argparse
from pathlib import Path

from ray import tune as ray_tune
from ray.tune.search.optuna import OptunaSearch

from raylt import load_config
from tune import draw_pareto, param_space, pareto_front, space, trainable

SETTINGS = [
    "method=la",
    "method.prior=global",
    "data.clients=4",
    "data.imbalance=20",
    "data.groups=[40,90]",
    "local.epochs=1",
]
# on validation samples: accuracy on the clients' own class mix, and on classes with few samples
METRICS = ("matched", "few")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    results = search_front(arguments.folder, arguments.trials, arguments.rounds)
    figures = [result.metrics or {} for result in results]
    names = [_short(result.config or {}) for result in results]
    for index in pareto_front(figures, METRICS):
        print(f"{names[index]}: own class mix {figures[index]['matched']:.3f}, few-shot {figures[index]['few']:.3f}")
    (arguments.folder / "pareto.png").write_bytes(draw_pareto(figures, METRICS, names))


def search_front(folder: Path, trials: int, rounds: int) -> ray_tune.ResultGrid:
    """Run the trials, two at once; their files go into a folder."""
    config = load_config(None, [*SETTINGS, f"federation.rounds={rounds}", f"evaluation.every={rounds}"])
    ranges = space(config, {"local.lr": "loguniform(0.02, 0.3)"}, fields=["tau"])
    tuner = ray_tune.Tuner(
        trainable(config, parallel=2),
        param_space=param_space(ranges),
        tune_config=ray_tune.TuneConfig(
            search_alg=OptunaSearch(metric=list(METRICS), mode=["max", "max"], seed=0),
            num_samples=trials,
            max_concurrent_trials=2,
            reuse_actors=True,
        ),
        run_config=ray_tune.RunConfig(name="two-objectives", storage_path=str(folder.resolve())),
    )
    return tuner.fit()


def _short(values: dict[str, float]) -> str:
    """Return a trial's values in a few characters."""
    return " ".join(f"{key.rpartition('.')[2]} {value:.2g}" for key, value in values.items())


if __name__ == "__main__":
    main()
