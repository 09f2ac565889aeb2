"""BOHB with Ray Tune: HyperBand stops trials early, and a density model of the good trials proposes the next values.

    pip install hpbandster ConfigSpace
    python bayesian_hyperband.py results

BOHB (Falkner et al., ICML 2018) starts trials of FedProx in brackets, two at once. Each bracket gives its trials a few
rounds, continues the better third with three times as many, and ends the others. The script prints the trials, the
longest ones first.
"""

import argparse
from pathlib import Path

from ray import tune as ray_tune
from ray.tune.schedulers import HyperBandForBOHB
from ray.tune.search.bohb import TuneBOHB

from raylt import load_config
from tune import param_space, space, trainable

SETTINGS = ["method=fedprox", "data.clients=4", "data.imbalance=5", "local.epochs=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results = search_brackets(arguments.folder, arguments.trials, arguments.rounds)
    rows = [(result.metrics or {}, result.config or {}) for result in results]
    for figures, values in sorted(rows, key=lambda row: (-row[0]["round"], -row[0]["accuracy"])):
        settings = " ".join(f"{key}={value:.3g}" for key, value in values.items())
        print(f"validation accuracy {figures['accuracy']:.3f} after round {figures['round']}: {settings}")


def search_brackets(folder: Path, trials: int, rounds: int) -> ray_tune.ResultGrid:
    """Run the trials, two at once; their files go into a folder."""
    config = load_config(None, [*SETTINGS, f"federation.rounds={rounds}"])
    ranges = space(config, {"local.lr": "loguniform(0.001, 0.3)"}, fields=["mu"])
    tuner = ray_tune.Tuner(
        trainable(config, parallel=2),
        param_space=param_space(ranges),
        tune_config=ray_tune.TuneConfig(
            metric="accuracy",
            mode="max",
            search_alg=TuneBOHB(seed=0),
            scheduler=HyperBandForBOHB(max_t=rounds, reduction_factor=3),
            num_samples=trials,
            max_concurrent_trials=2,
            reuse_actors=True,
        ),
        run_config=ray_tune.RunConfig(
            name="bohb",
            storage_path=str(folder.resolve()),
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=2),
        ),
    )
    return tuner.fit()


if __name__ == "__main__":
    main()
