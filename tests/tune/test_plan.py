import io
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from raylt.config import Config
from raylt.errors import CheckpointError
from raylt.hyper import Choice, LogUniform, Uniform
from tune.asha import Outcome
from tune.plan import (
    OVER,
    WAIT,
    SearchPlan,
    SearchState,
    TaskSize,
    _propose,
    client_steps,
    cost_of,
    default_metric,
    distributions_of,
    front_of,
    with_validation,
)
from tune.records import Score, TrialRecord, on_split
from tune.report.drawing import COLOURS, PAPER, draw
from tune.report.results import best_yaml, importance_lines, table_of, write
from tune.space import Grid
from tune.space import draw as drawn_values

SPACE = {"method.mu": LogUniform(1e-4, 1.0), "local.lr": LogUniform(0.01, 0.3)}
BASE = Config(method="fedavg", federation={"rounds": 9}, data={"validation": 0.2, "clients": 3})


def size_of(config):
    return TaskSize([64, 32, 33], (8, 8, 1), 4)


def plan(**changes):
    return SearchPlan(**{"base": BASE, "spaces": {"fedprox": SPACE}, "samples": 12, "lag": 2, **changes})


def score(values, step):
    """Return a score that is best at lr = 0.1 and rises with every round."""
    return 1 - distance(values.get("local.lr", 0.1)) + step / 100


def distance(lr):
    return abs(math.log10(lr / 0.1))


def run(state, rng, at_once):
    """Run trials at once, with results at random times, until the search ends."""
    under_way = []
    while True:
        while len(under_way) < at_once and isinstance(record := state.next(), TrialRecord):
            under_way.append((record, 0))
        if not under_way:
            return state
        record, step = under_way.pop(rng.randrange(len(under_way)))
        step += 1
        kind = "final" if step == 9 else "round"
        record.scores[step] = Score(step, kind, score(record.values, step), 0, {}, {})
        state.update(record)
        if step < 9 and not (record.outcome and record.outcome.state == "stopped"):
            under_way.append((record, step))
        else:
            record.closed = True


def results(state):
    return [(r.id, r.values, r.outcome) for r in state.trials]


@pytest.mark.parametrize("searcher", ["tpe", "random", "grid"])
def test_a_search_has_the_same_outcome_whatever_the_timing(searcher):
    straight = results(run(SearchState(plan(searcher=searcher), size_of), random.Random(0), 1))
    assert len(straight) == (9 if searcher == "grid" else 12)
    assert "stopped" in {outcome.state for *_, outcome in straight}
    for seed in range(5):
        assert results(run(SearchState(plan(searcher=searcher), size_of), random.Random(seed), 2)) == straight


def test_tpe_goes_where_scores_are_good():
    first, later = 0.0, 0.0
    for seed in range(4):
        state = run(SearchState(plan(samples=30, seed=seed), size_of), random.Random(0), 1)
        away = [distance(r.values["local.lr"]) for r in state.trials]
        first, later = first + sum(away[:10]) / 10, later + sum(away[10:]) / 20
    assert later < 0.75 * first


@pytest.mark.parametrize(("samples", "random_trials"), [(6, 4), (20, 6), (60, 10), (None, 10)])
def test_tpe_learns_after_a_third_of_the_samples_and_from_four_to_ten_trials(samples, random_trials):
    state = SearchState(plan(samples=samples, lag=1, scheduler="none"), size_of)
    for number in range(random_trials + 1):
        record = state.next()
        assert (record.values == drawn_values(SPACE, 0, "fedprox", number)) == (number < random_trials)
        record.scores[9] = Score(9, "final", score(record.values, 0), 0, {}, {})
        state.update(record)


def test_tpe_searches_a_range_of_decades_by_its_logarithm():
    ranges = distributions_of({"mu": LogUniform(1e-4, 1.0), "momentum": Uniform(0.0, 1.0)})
    assert {name: (each.low, each.high, each.log) for name, each in ranges.items()} == {
        "mu": (1e-4, 1.0, True),
        "momentum": (0.0, 1.0, False),
    }


def test_tpe_learns_from_the_scores_of_stopped_trials():
    trials = []
    for number in range(30):
        values = drawn_values(SPACE, 0, "fedprox", number)
        trials.append(TrialRecord(f"t{number}", "fedprox", values, BASE, 9))

    def proposed(value):
        """Return how far from 0.1 the proposed rates are, where a rate has this score."""
        for trial in trials:
            trial.outcome = Outcome("stopped", 3, value(trial.values["local.lr"]))
        return sum(distance(_propose(SPACE, trials, seed)["local.lr"]) for seed in range(8)) / 8

    assert proposed(lambda lr: 1 - distance(lr)) < 0.5 * proposed(distance)
    values = _propose(SPACE, trials, 0)
    assert values == {key: float(f"{value:.4g}") for key, value in values.items()}  # as readable as drawn ones


def test_for_tpe_a_finished_trial_is_better_than_a_stopped_one_whatever_their_scores():
    trials = [TrialRecord(f"t{n}", "fedprox", drawn_values(SPACE, 0, "fedprox", n), BASE, 9) for n in range(30)]
    middle = sorted(distance(trial.values["local.lr"]) for trial in trials)[15]

    def proposed(state):
        """Return how far from 0.1 the proposed rates are, where the nearer half of the rates has better scores."""
        for trial in trials:
            near = distance(trial.values["local.lr"]) < middle
            trial.outcome = Outcome(state, 3, 0.9) if near else Outcome("done", 9, 0.5)
        return sum(distance(_propose(SPACE, trials, seed)["local.lr"]) for seed in range(8)) / 8

    assert proposed("done") < 0.7 * proposed("stopped")


def test_the_best_is_one_that_went_to_its_end():
    state = run(SearchState(plan(), size_of), random.Random(0), 2)
    best = state.best()
    assert best is not None
    assert best.outcome.score == max(r.outcome.score for r in state.trials if r.outcome.state == "done")


def test_the_method_with_the_fewest_trials_is_next_until_none_has_another():
    one = {"local.lr": SPACE["local.lr"]}
    state = SearchState(plan(spaces={"fedprox": one, "fedavg": one}, searcher="random", samples=2), size_of)
    ids = [state.next().id for _ in range(4)]
    assert ids == ["fedprox-000", "fedavg-000", "fedprox-001", "fedavg-001"]
    assert state.next() == OVER
    # the search waits as long as one method does, although the other is over
    for spaces in ({"fedprox": SPACE, "fedavg": {}}, {"fedavg": {}, "fedprox": SPACE}):
        state = SearchState(plan(spaces=spaces, lag=1), size_of)
        assert [isinstance(state.next(), TrialRecord) for _ in range(2)] == [True, True]
        assert state.next() == WAIT


def test_the_best_trial_of_a_method_is_one_of_its_own():
    state = SearchState(plan(spaces={"fedprox": SPACE, "moon": SPACE}, samples=1, scheduler="none"), size_of)
    for value in (0.5, 0.6):
        record = state.next()
        record.scores[9] = Score(9, "final", value, 0, {}, {})
        state.update(record)
    assert state.best().id == state.best("moon").id == "moon-000"
    first = state.sequences["fedprox"].records[0].outcome
    state.sequences["fedprox"].records[0].outcome = state.sequences["moon"].records[0].outcome
    assert state.best().id == "fedprox-000"  # the first of equals
    state.sequences["fedprox"].records[0].outcome = first
    assert state.best("fedprox").id == "fedprox-000"
    stopped = state.sequences["moon"].records[0]
    stopped.outcome = Outcome("stopped", 3, 0.9)  # after a round before the last, it is not compared
    assert state.best().id == "fedprox-000"
    assert state.best("moon") is None


def test_a_budget_waits_for_running_trials_which_may_leave_some_of_it():
    cost = client_steps(BASE, size_of(BASE).clients)
    state = SearchState(plan(samples=None, budget=3 * cost, splits=2, searcher="random", scheduler="none"), size_of)
    first = state.next()
    assert state.next() == WAIT  # each trial takes twice the cost of a split
    first.scores[9] = Score(9, "final", 0.5, 0, {}, {})
    state.update(first)
    assert state.next() == OVER
    state = SearchState(plan(samples=None, budget=2 * cost, searcher="random"), size_of)
    first, second = state.next(), state.next()
    assert state.next() == WAIT
    for record, value in ((first, 0.5), (second, 0.4)):
        record.scores[1] = Score(1, "round", value, 0, {}, {})
    first.scores |= {3: Score(3, "round", 0.5, 0, {}, {}), 9: Score(9, "final", 0.5, 0, {}, {})}
    state.update(first)
    assert second.outcome.state == "stopped"
    assert state.next() == OVER  # a ninth of a trial was spent, and eight ninths are too few


def test_trials_are_compared_with_trials_of_as_many_rounds():
    spaces = {"fedprox": {"federation.rounds": Grid((9, 27)), "local.lr": SPACE["local.lr"]}}
    state = SearchState(plan(spaces=spaces, searcher="random", samples=1), size_of)
    short, long = state.next(), state.next()
    assert (short.config.federation.rounds, long.config.federation.rounds) == (9, 27)
    short.scores = {1: Score(1, "round", 0.8, 0, {}, {}), 3: Score(3, "round", 0.9, 0, {}, {})}
    long.scores = {3: Score(3, "round", 0.1, 0, {}, {})}
    state.update(long)
    assert long.outcome is None  # after as many rounds the other is better, but of its rounds it has taken a third


def test_tpe_has_another_seed_for_each_trial_and_leaves_grids_alone(monkeypatch):
    seeds = []

    def propose(space, earlier, seed):
        seeds.append(seed)
        return dict.fromkeys(space, 0.1)

    monkeypatch.setattr("tune.plan._propose", propose)
    space = {"local.momentum": Grid((0.0, 0.9)), "local.lr": SPACE["local.lr"]}
    for seed in (0, 1):
        settings = plan(spaces={"fedprox": space, "fedavg": space}, samples=6, lag=1, scheduler="none", seed=seed)
        state = SearchState(settings, size_of)
        while isinstance(record := state.next(), TrialRecord):
            record.scores[9] = Score(9, "final", 0.5, 0, {}, {})
            state.update(record)
        assert [record.values["local.momentum"] for record in state.trials] == [0.0, 0.9] * 12
        assert sum(record.values["local.lr"] == 0.1 for record in state.trials) == 16
    assert len(set(seeds)) == len(seeds) == 32


@pytest.mark.parametrize(
    ("method", "local", "multiple"),
    [
        ({"name": "fedavg"}, {"epochs": 2}, 1),
        ({"name": "ditto"}, {"epochs": 2}, 2),
        ({"name": "fedrep", "head_epochs": 4}, {"epochs": 2}, (4 / 3 + 2) / 2),
        # 4 steps where a pass over 64, 32 and 33 samples has 2, 1 and 1: three passes, and four of the head at a third
        ({"name": "fedrep", "head_epochs": 4}, {"steps": 4}, (4 / 3 + 3) / 3),
    ],
)
def test_a_budget_in_passes_counts_what_a_method_computes(method, local, multiple):
    config = BASE.model_copy(update={"method": method, "local": BASE.local.model_copy(update=local)})
    steps = client_steps(config, size_of(config).clients)
    assert cost_of(config, size_of(config), "steps") == steps
    assert cost_of(config, size_of(config), "passes") == round(multiple * steps)


def test_a_budget_in_passes_counts_the_servers_work():
    method = {"name": "ccvr", "virtual": 500, "retrain_epochs": 1000}
    config = BASE.model_copy(update={"method": method, "model": "small"})
    steps = client_steps(config, size_of(config).clients)
    assert cost_of(config, size_of(config), "steps") == steps
    # 1000 epochs of a softmax regression on 500 features of each of 4 classes, d = 64
    step = 3 * BASE.local.batch * (32 * 9 * 64 + 64 * 32 * 9 * 16)
    work = 2 * 64 * 4 * 2000 * 1000 / step
    assert work > 10
    assert cost_of(config, size_of(config), "passes") == round(steps + work)


def test_a_method_that_computes_twice_as_much_gets_half_the_trials():
    def trials(count):
        budget = 10 * client_steps(BASE, size_of(BASE).clients)
        state = SearchState(
            plan(
                spaces={"ditto": {"local.lr": SPACE["local.lr"]}},
                samples=None,
                budget=budget,
                count=count,
                scheduler="none",
                searcher="random",
            ),
            size_of,
        )
        return len(run(state, random.Random(0), 1).trials)

    assert trials("steps") == 10
    assert trials("passes") == 5


def test_a_trial_that_ends_spends_its_cost_on_every_split_and_a_stopped_one_on_the_first():
    record = TrialRecord("a", "fedprox", {}, BASE, 90, splits=2)
    assert record.spent == 180
    record.outcome = Outcome("done", 9, 0.5)
    assert record.spent == 180
    record.outcome = Outcome("failed", 9, None)
    assert record.spent == 180
    record.outcome = Outcome("stopped", 3, 0.5)
    assert record.spent == 30
    budget = 10 * client_steps(BASE, size_of(BASE).clients)
    changes = {"samples": None, "budget": budget, "scheduler": "none", "searcher": "random"}
    for splits, trials in ((1, 10), (2, 5)):
        state = SearchState(plan(**changes, splits=splits), size_of)
        assert len(run(state, random.Random(0), 1).trials) == trials


def test_a_plan_without_later_settings_keeps_its_hash():
    tree = plan().to_json()
    assert not {"count", "splits", "other_metrics"} & tree.keys()
    again = SearchPlan.from_json(json.dumps(plan(splits=2, count="passes").to_json()).encode(), "search.json")
    assert (again.splits, again.count) == (2, "passes")


def test_client_steps_by_hand():
    # 2 epochs with batches of 32 over 64, 32 and 33 samples: 4 + 2 + 2, as a batch of one is dropped; 9 rounds, all
    # clients
    assert client_steps(BASE, size_of(BASE).clients) == 9 * 8
    part = BASE.model_copy(update={"federation": BASE.federation.model_copy(update={"participation": 0.3})})
    assert client_steps(part, size_of(part).clients) == round(9 * 8 / 3)
    # one of three clients joins after training, and each round asks half of the others
    late = Config(
        method="fedavg", federation={"rounds": 9, "participation": 0.5}, data={"clients": 3, "new_clients": 1}
    )
    assert client_steps(late, [64, 32]) == 9 * (4 + 2) / 2
    # without a number of clients, as a source with clients of its own decides it; two of five that train hold nothing
    own = late.model_copy(update={"data": late.data.model_copy(update={"clients": None, "new_clients": 3})})
    assert client_steps(own, [64, 32, 0, 0, 32]) == 9 * 3 * (4 + 2 + 2) / 3
    assert client_steps(BASE, [64, 32, 0, 0, 32]) == 9 * (4 + 2 + 2)  # all clients that hold samples


def test_a_search_holds_out_a_fifth_unless_another_share_is_set():
    configs = [Config(method="fedavg", data={"validation": share}) for share in (0.0, 0.1)]
    assert [with_validation(config).data.validation for config in configs] == [0.2, 0.1]


def test_a_search_compares_the_global_models_unless_all_methods_have_models_of_clients():
    methods = (["fedavg"], ["fedper"], ["fedavg", "fedper"], ["fedper", "ditto"])
    assert [default_metric(BASE, names) for names in methods] == ["accuracy", "local", "accuracy", "local"]
    own_statistics = Config(method="fedavg", federation={"batchnorm": "local"})
    assert default_metric(own_statistics, ["fedavg"]) == "local"


def test_methods_share_nothing_but_the_budget_each_may_spend():
    spaces = {"fedavg": {"local.lr": SPACE["local.lr"]}, "fedprox": SPACE}
    budget = 10 * 72
    state = run(SearchState(plan(spaces=spaces, samples=None, budget=budget), size_of), random.Random(0), 2)
    alone = run(SearchState(plan(samples=None, budget=budget), size_of), random.Random(3), 2)
    assert results(alone) == [r for r in results(state) if r[0].startswith("fedprox")]
    for method in spaces:
        trials = [r for r in state.trials if r.method == method]
        assert budget - 72 < sum(r.spent for r in trials) <= budget
        assert len(trials) > 10  # budget that stopped trials left goes to others


def test_a_method_without_fields_has_one_trial():
    state = run(SearchState(plan(spaces={"fedavg": {}, "fedprox": SPACE}), size_of), random.Random(0), 1)
    assert [r.method for r in state.trials].count("fedavg") == 1


def test_tpe_waits_for_the_trials_it_learns_from():
    state = SearchState(plan(), size_of)
    assert [isinstance(state.next(), TrialRecord) for _ in range(2)] == [True, True]
    assert state.next() == WAIT
    state = SearchState(plan(searcher="random", samples=2), size_of)
    assert [isinstance(state.next(), TrialRecord) for _ in range(2)] == [True, True]
    assert state.next() == OVER


def test_a_plan_survives_json():
    original = plan(spaces={"fedprox": SPACE | {"x.y": Uniform(0.0, 1.0)}})
    assert SearchPlan.from_json(json.dumps(original.to_json()).encode(), "search.json") == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 9}, "search.json: the file was changed after the search began"),
        ({"metric": "luck"}, "metric: input should be 'accu"),
        ({"seed": "1"}, "seed: input should be a valid integer"),
        ({"spaces": 3}, "spaces: input should be a valid dict"),
        ({"more": 1}, "more: extra inputs are not permitted"),
    ],
)
def test_a_plan_that_was_changed_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        SearchPlan.from_json(json.dumps(plan(spaces={"fedprox": SPACE}).to_json() | change).encode(), "search.json")


def test_a_search_with_one_metric_keeps_the_hash_that_it_had_before_there_were_several():
    assert "other_metrics" not in plan(metric="few").to_json()
    several = plan(metric="few", other_metrics=("many", "local"))
    content = several.to_json()
    assert SearchPlan.from_json(json.dumps(content).encode(), "search.json") == several
    with pytest.raises(CheckpointError, match="was changed"):
        SearchPlan.from_json(json.dumps(content | {"other_metrics": ["many"]}).encode(), "search.json")


def test_the_front_has_finished_trials_only_and_the_table_marks_them():
    several = plan(searcher="random", samples=4, metric="few", other_metrics=("many",))
    state = SearchState(several, size_of)
    records = [state.next() for _ in range(4)]
    # the last trial dominates all others in round 1, and is stopped there by its first metric
    figures = [
        ([0.1, 0.3, 0.5], 0.5),
        ([0.2, 0.4, 0.6], 0.4),
        ([0.3, 0.5, 0.55], 0.1),
        ([0.0], 0.9),
    ]
    for record, (few, many) in zip(records, figures, strict=True):
        kinds = zip((1, 3, 9), ("round", "round", "final"), few, strict=False)
        record.scores = {s: Score(s, kind, v, s, {"few": v, "many": many}, {}) for s, kind, v in kinds}
        record.closed = True
    state.update(records[0])
    assert [record.outcome.state for record in records] == ["done", "done", "done", "stopped"]
    assert front_of(several, state.trials) == [records[1], records[0]]
    table = table_of(several, state)
    assert [row[1] for row in table.rows] == ["front", "done", "front", "stopped"]
    assert table.head[3:5] == ["few", "many"]
    assert table_of(plan(searcher="random", metric="few"), state).rows[0][1] == "done"


def made_trials(settings):
    """Return a state with trials of each outcome, with their scores."""
    state = SearchState(settings, size_of)
    records = [state.next() for _ in range(6)]
    ends = [("done", 9, 0.7), ("failed", 1, None), ("stopped", 1, 0.5), ("stopped", 3, 0.4), None, ("done", 9, 0.8)]
    for record, end in zip(records, ends, strict=True):
        if end is None:
            continue
        record.outcome = Outcome(*end)
        _, step, value = end
        if value is not None:
            kind = "final" if step == 9 else "round"
            record.scores[step] = Score(step, kind, value, 7 * step, {"accuracy": value}, {"accuracy": value - 0.05})
    records[2].scores[3] = Score(3, "round", 0.9, 21, {"accuracy": 0.9}, {"accuracy": 0.9})
    return state, records


def test_the_table_of_trials_has_the_best_first_and_the_figures_that_count():
    settings = plan(searcher="random", samples=6)
    state, records = made_trials(settings)
    table = table_of(settings, state)
    columns = dict(zip(table.head, map(list, zip(*table.rows, strict=True)), strict=True))
    order = [5, 0, 3, 2, 1, 4]
    assert columns["trial"] == [records[k].id for k in order]
    assert columns["state"] == ["done", "done", "stopped", "stopped", "failed", "open"]
    assert columns["round"] == ["9", "9", "3", "1", "1", "-"]
    assert columns["accuracy"] == ["80.00", "70.00", "40.00", "50.00", "-", "-"]
    assert columns["test"] == ["75.00", "65.00", "35.00", "45.00", "-", "-"]
    assert columns[settings.unit] == [str(steps) for steps in (72, 72, 24, 8, 72, 72)]
    assert columns["lr"] == [f"{records[k].values['local.lr']:g}" for k in order]
    cut = table_of(settings, state, most=4)
    assert [row[0] for row in cut.rows] == [records[k].id for k in order[:4]]
    assert cut.notes == {"trials not shown": ["2 more, in trials.csv"]}
    twice = plan(spaces={"fedprox": {"local.lr": SPACE["local.lr"], "method.lr": SPACE["local.lr"]}})
    assert table_of(twice, state).head[-2:] == ["local.lr", "method.lr"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_cuts_no_name_and_no_figure_of_a_trial(width):
    ranges = SPACE | {"local.momentum": Choice(0.0, 0.9), "local.optimiser": Choice("sgd", "adam")}
    settings = plan(spaces={"fedprox": ranges}, searcher="random", samples=6)
    state, _ = made_trials(settings)
    table = table_of(settings, state)
    console = Console(width=width, file=io.StringIO())
    console.print(table.screen())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    for row in table.rows:
        assert set(row) <= set(words)
    assert set(table.head) <= set(words)


def test_results_have_the_front_and_the_points_that_count(tmp_path, monkeypatch):
    monkeypatch.setattr("tune.report.results.best_yaml", lambda folder, plan, best: f"{best.id}\n")
    monkeypatch.setattr("tune.report.results.draw", lambda *_: b"")
    monkeypatch.setattr("tune.report.results._draw_front", lambda *_: b"")
    spaces = {"fedavg": {"local.lr": SPACE["local.lr"]}, "fedprox": SPACE}
    settings = plan(spaces=spaces, searcher="random", samples=3, other_metrics=("few",))
    state, records = made_trials(settings)
    assert [record.method for record in records] == ["fedavg", "fedprox"] * 3
    records[0].outcome = None
    write(tmp_path, settings, state)
    trials = {trial["trial"]: trial for trial in json.loads((tmp_path / "trials.json").read_text())}
    assert {name: [point["step"] for point in trial["points"]] for name, trial in trials.items()} == {
        "fedavg-000": [9],
        "fedavg-001": [1],  # it was stopped, and ran to round 3 until that was known
        "fedavg-002": [],
        "fedprox-000": [],
        "fedprox-001": [3],
        "fedprox-002": [9],
    }
    assert not any(trial["front"] for trial in trials.values())  # none has a figure by the second metric
    records[5].scores[9].validation["few"] = 0.1
    write(tmp_path, settings, state)
    rows = json.loads((tmp_path / "trials.json").read_text())
    assert [trial["trial"] for trial in rows if trial["front"]] == ["fedprox-002"]
    # no trial of the first method has finished
    assert (tmp_path / "best.yaml").read_text() == "fedprox-002\n"


def test_the_best_configuration_says_which_figures_to_expect(tmp_path, monkeypatch):
    summary = {"accuracy": {"last": 0.65, "best": 0.9}, "model_sha256": "ab" * 32}
    monkeypatch.setattr("tune.report.results.Files", lambda folder: SimpleNamespace(summary=lambda: summary))
    config = Config(method="fedavg", data={"seed": 7, "validation": 0.2})
    record = TrialRecord("fedavg-000", "fedavg", {}, config, 9, splits=3)
    validation, test = {"few": 0.25, "many": 0.5}, {"few": 0.3, "many": 0.6}
    record.scores[9] = Score(9, "final", 0.25, 9, validation, test, split=2)
    record.outcome = Outcome("done", 9, 0.25)
    text = best_yaml(tmp_path, plan(metric="few", other_metrics=("many",), splits=3), record)
    head = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert "test accuracy 65.00 %, model sha256 abababababababab." in head
    assert "It was chosen for few 25.00 % on 0.2 of the training samples" in head
    assert "the worst of 3 splits, with data.seed=9." in head
    assert "By the search's other metrics: many 50.00 %." in head


def test_the_importance_of_each_method_is_a_line_in_percent(tmp_path):
    shares = {"fedprox": {"local.lr": 0.8, "method.mu": 0.2}, "fedavg": {}}
    (tmp_path / "importance.json").write_text(json.dumps(shares))
    assert importance_lines(tmp_path) == ["importance for fedprox: local.lr 80 %, method.mu 20 %"]


def test_fields_of_one_name_with_other_ranges_have_a_slice_each():
    spaces = {"fedprox": {"method.mu": LogUniform(1e-4, 1.0)}, "moon": {"method.mu": Choice(0.1, 5)}}
    both = plan(spaces=spaces, searcher="random", scheduler="none", samples=2)
    state = SearchState(both, size_of)
    while isinstance(record := state.next(), TrialRecord):
        record.scores = {9: Score(9, "final", 0.5, 9, {}, {})}
        state.update(record)
    assert {record.method for record in state.trials} == {"fedprox", "moon"}
    assert draw(both, state, {}).startswith(b"\x89PNG")


def test_a_picture_of_a_search_has_the_counted_scores_of_each_trial_over_its_cost(monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))
    settings = plan(searcher="random", samples=3)
    state = SearchState(settings, size_of)
    records = [state.next() for _ in range(3)]
    # the second trial fails, and the third is stopped after round 1, beyond which it runs
    points = [[(1, 0.5), (3, 0.6), (10, 0.7)], [], [(1, 0.4), (3, 0.45)]]
    for record, own in zip(records, points, strict=True):
        record.scores = {
            step: Score(step, "final" if step == 10 else "rehearsal", value, 7 * step, {}, {}) for step, value in own
        }
        record.closed = True
    records[0].scores[2] = Score(2, "proxy", 0.1, 14, {}, {})
    records[1].failed = "it failed"
    state.update(records[0])
    assert [record.outcome.state for record in records] == ["done", "failed", "stopped"]
    draw(settings, state, {"fedprox": {"local.lr": 0.8, "method.mu": 0.2}})
    scores, mu, lr = figures[0].axes
    drawn = [(np.ravel(line.get_xdata()).tolist(), np.ravel(line.get_ydata()).tolist()) for line in scores.lines]
    expected = [([7, 21, 70], [50, 60, 70]), ([70], [70]), ([7], [40]), ([7], [40])]
    assert drawn == [(x, pytest.approx(y)) for x, y in expected]
    assert [line.get_markerfacecolor() for line in scores.lines[1::2]] == [COLOURS[0], PAPER]
    assert scores.get_title(loc="left") == "3 trials, 1 stopped early (hollow)"
    assert [np.ravel(line.get_xdata())[0] for line in lr.lines] == [records[k].values["local.lr"] for k in (0, 2)]
    assert [np.ravel(line.get_ydata())[0] for line in lr.lines] == pytest.approx([70, 40])
    assert [line.get_markerfacecolor() for line in lr.lines] == [COLOURS[0], PAPER]
    assert mu.get_xlabel() == "method.mu   importance 20 %"
    assert lr.get_xlabel() == "local.lr   importance 80 %"
    assert list(mu.get_xticks()) == pytest.approx([0.0001, 0.01, 1])


def test_a_trial_that_was_stopped_before_an_interruption_has_an_outcome_after_it():
    state = SearchState(plan(searcher="random", samples=5), size_of)
    records = [state.next() for _ in range(5)]
    # the fourth trial was stopped
    scores = [(0.05, 0.1, 0.1), (0.5, 0.6, 0.5), (0.6, 0.7, 0.6), (0.55,), (0.7, 0.8, 0.7)]
    for record, values in zip(records, scores, strict=True):
        kinds = zip((1, 3, 9), ("round", "round", "final"), values, strict=False)
        record.scores = {step: Score(step, kind, value, step, {}, {}) for step, kind, value in kinds}
        record.closed = True
    state.update(records[0])
    assert [record.outcome.state for record in records] == ["done", "done", "done", "stopped", "done"]
    assert state.best() is records[4]


def test_splits_of_a_trial_have_the_seeds_that_follow_that_of_the_data():
    config = Config(method="fedavg", data={"seed": 7})
    assert [on_split(config, split).data.seed for split in range(3)] == [7, 8, 9]
    assert on_split(config, 0) == config
