"""Population-based training of a federation with Ray Tune: learning rate and proximal term change while it trains.

    python population_based.py results

Two trials of FedProx start from different learning rates and run at once. Every three rounds the worse one takes over
the model of the better one and continues with changed values. The last line shows the best trial's final values.
"""

import argparse
from pathlib import Path

from ray import tune as ray_tune
from ray.tune.schedulers import PopulationBasedTraining

from raylt import load_config
from tune import model_of, trainable

SETTINGS = ["method=fedprox", "data.clients=4", "data.imbalance=5", "federation.rounds=6", "local.epochs=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    results = tune_population(parser.parse_args().folder)
    best = results.get_best_result()
    assert best.metrics is not None
    assert best.checkpoint is not None
    model = model_of(best.checkpoint)
    print(f"validation accuracy {best.metrics['accuracy']:.3f} with {best.config}, {len(model.class_names)} classes")


def tune_population(folder: Path) -> ray_tune.ResultGrid:
    """Run the two trials; their files go into a folder."""
    scheduler = PopulationBasedTraining(
        time_attr="round",
        perturbation_interval=3,
        quantile_fraction=0.5,
        hyperparam_mutations={"local.lr": ray_tune.loguniform(0.02, 0.2), "method.mu": [0.0, 0.01, 0.1]},
        synch=True,
    )
    tuner = ray_tune.Tuner(
        trainable(load_config(None, SETTINGS), parallel=2),
        param_space={"local.lr": ray_tune.grid_search([0.0005, 0.1]), "method.mu": 0.01},
        tune_config=ray_tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=ray_tune.RunConfig(
            name="population",
            storage_path=str(folder.resolve()),
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=2),
        ),
    )
    return tuner.fit()


if __name__ == "__main__":
    main()
