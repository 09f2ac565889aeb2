# A first comparison: which method brings the rare classes back?
#
# Run it from top to bottom (python first_comparison.py, some seconds), or cell by cell in an editor that knows `# %%`.
# The data are scikit-learn's digits, so nothing is downloaded.

# %% A small network of our own: a function of the number of classes and the shape of an image
import pandas
from torch import nn

import raylt


def network(classes, shape):
    height, width, channels = shape
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, 64), nn.ReLU())
    return raylt.SplitModel(encoder, 64, classes)


# %% Three methods, the same clients and the same long tail
METHODS = {"fedavg": {}, "la": {}, "ccvr": {"virtual": 200, "retrain_epochs": 10}}  # each with its own fields
SEEDS = (0, 1, 2)
SHARED = {
    "data": "digits",
    "clients": 10,
    "imbalance": 20,  # the largest class has 20 times as many samples as the smallest
    "rounds": 5,
    "model": network,
    "fleet": "local",
    "quiet": True,
    "out": "comparison",
}

# %% A seed fixes split, initial weights and batches, so the methods of a seed can be compared in pairs
runs = {
    (name, seed): raylt.run(
        name, seed=seed, overrides=[f"data.seed={seed}"], method=fields, name=f"{name}-{seed}", **SHARED
    )
    for name, fields in METHODS.items()
    for seed in SEEDS
}

# %% Accuracy on the balanced test set, for all classes and for the groups by their number of training samples
accuracy = pandas.concat({key: run.metrics.query("metric == 'accuracy'") for key, run in runs.items()})
accuracy.index.names = ["method", "seed", "row"]
last = accuracy.sort_values("step").groupby(["method", "seed", "group"]).value.last().unstack()
print(last.groupby("method").mean().mul(100).round(1).loc[list(METHODS)])

# %% The difference to FedAvg, paired by seed: a claim needs more seeds and an interval, as `raylt study` computes it
difference = last.few.unstack("method").sub(last.few.xs("fedavg"), axis=0).drop(columns="fedavg")
print(difference.mul(100).round(1))

# %% Accuracy of each client, which a mean over clients hides
table = raylt.compare_clients([runs["fedavg", 0], runs["la", 0]], "matched")
raylt.draw_clients(table, "comparison/clients.png")
