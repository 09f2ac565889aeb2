"""The options of `raylt tune` reach the search."""

from pathlib import Path

import tune
from raylt.errors import ConfigError

SEARCH = ["tune", "method=fedprox", "--samples", 3, "--name", "s", "--out", "there", "--seed", 5, "--retries", 1]
SEARCH += ["--grace", 2, "--parallel", 4, "--metric", "few", "--metric", "many", "--searcher", "random"]


def test_the_search_has_every_option(raylt, monkeypatch):
    given = {}

    def search(config, spaces, **options):
        given.update(options, methods=list(spaces))
        raise ConfigError("search: ends here. Repeat it.", code="config.conflict")

    monkeypatch.setattr(tune, "search", search)
    own = ["--scheduler", "none", "--budget", 900, "--count", "passes", "--splits", 6, "--fleet", "local"]
    assert raylt(*SEARCH, *own, "--track", "mlflow").code == 2
    del given["callbacks"]
    assert given == {
        "methods": ["fedprox"],
        "metric": ["few", "many"],
        "samples": 3,
        "name": "s",
        "out": Path("there"),
        "seed": 5,
        "retries": 1,
        "grace": 2,
        "parallel": 4,
        "searcher": "random",
        "scheduler": "none",
        "budget": 900,
        "count": "passes",
        "splits": 6,
        "fleet": "local",
        "address": None,
        "track": ["mlflow"],
    }


def test_a_search_with_a_scheduler_of_ray_has_its_options(raylt, monkeypatch):
    given = []
    monkeypatch.setattr("raylt.cli.searches.ray_tune.search", lambda config, spaces, *options: given.append(options))
    assert raylt(*SEARCH, "--scheduler", "median", "--address", "auto").code == 0
    [(folder, name, address, choices, _)] = given
    assert (folder, name, address) == (Path("there"), "s", "auto")
    assert choices == {
        "searcher": "random",
        "scheduler": "median",
        "grace": 2,
        "seed": 5,
        "samples": 3,
        "retries": 1,
        "metrics": ["few", "many"],
        "parallel": 4,
    }
