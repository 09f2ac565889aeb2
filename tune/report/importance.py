"""Importance of the searched settings by fANOVA (Hutter et al., ICML 2014), computed from a search's trials.

Optuna's fANOVA fits a random forest to the scores and splits their variance between the settings. All scores are of the
same step, the last one after which nearly all trials were evaluated. Under ASHA this is the first rung, because only
trials with good values reach later rungs.
"""

from collections.abc import Sequence

from raylt.hyper import Range
from raylt.seeds import seed_for
from tune.plan import SearchPlan, SearchState, as_params, distributions_of
from tune.records import TrialRecord
from tune.space import Grid, Space

MIN_TRIALS = 8  # With fewer trials, the random forest would find importance in noise.
NEARLY_ALL = 0.9  # Share of the trials, because some fail.


def importance(plan: SearchPlan, state: SearchState, method: str) -> dict[str, float]:
    """Return each setting's share of the variance of the scores, largest first. The shares sum to 1.

    Returns:
        The shares by setting. The dict is empty if too few trials were evaluated after the same step, if all have the
        same score, or if the search has fewer than two settings.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = _without_grids(plan.spaces[method])
    scores = _scores_of_one_step(state.sequences[method].records)
    if len(space) < 2 or len(set(scores.values())) < 2:
        return {}
    study = optuna.create_study(direction="maximize")
    distributions = distributions_of(space)
    for record in state.sequences[method].records:
        if record.id in scores:
            study.add_trial(
                optuna.create_trial(
                    value=scores[record.id], params=as_params(space, record.values), distributions=distributions
                )
            )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed_for(plan.seed, "importance", method) % 2**32)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _scores_of_one_step(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Return the trials' scores after the last step at which nearly all trials were evaluated."""
    by_step: dict[int, dict[str, float]] = {}
    for record in records:
        for score in record.counted_scores:
            if score.kind != "proxy":
                by_step.setdefault(score.step, {})[record.id] = score.value
    most = max((len(scores) for scores in by_step.values()), default=0)
    if most < MIN_TRIALS:
        return {}
    return by_step[max(step for step, scores in by_step.items() if len(scores) >= NEARLY_ALL * most)]


def _without_grids(space: Space) -> dict[str, Range]:
    """Return a search space without its grids, whose values occur equally often by design."""
    return {key: axis for key, axis in space.items() if not isinstance(axis, Grid)}
