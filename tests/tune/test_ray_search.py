"""The table of trials of a search with one of Ray's schedulers."""

from types import SimpleNamespace

from raylt.config import load
from tune.ray_search import RaySearchPlan, _conclude


class Results(list):
    """The results of Ray's trials, none of which raised an error."""

    errors = ()


def result(trial, accuracy):
    metrics = {} if trial is None else {"trial_id": trial, "round": 2, "accuracy": accuracy}
    return SimpleNamespace(metrics=metrics, config={"local.lr": 0.1}, error=None)


def test_a_trial_without_results_ranks_below_one_with_no_right_prediction(tmp_path):
    plan = RaySearchPlan(
        config=load(None, ["method=fedavg"]).model_dump(mode="json"),
        space={"local.lr": "loguniform(0.01, 1.0)"},
        samples=4,
        metric="accuracy",
        searcher="random",
        scheduler="median",
        grace=None,
        seed=0,
        parallel=1,
        retries=0,
    )
    results = Results([result(None, None), result("b", 0.0), result(None, None), result("a", 0.0)])
    assert [row["trial"] for row in _conclude(tmp_path, plan, results).rows] == ["a", "b", None, None]
