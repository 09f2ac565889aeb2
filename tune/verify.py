"""Checks of a search folder for `raylt verify`."""

from collections.abc import Iterator
from pathlib import Path

from raylt.disk import exists, is_folder
from raylt.errors import CheckpointError, RayltError, count_of
from raylt.runs.folder.reader import LOCK, Files
from raylt.runs.verify import Finding, finding_of, unbound_in, verify_inner
from raylt.store import Folder
from tune.plan import SearchPlan
from tune.records import MOST_SPLITS, PLAN, TRIALS, EndedTrialJson, figures_of, read_trials, split_folder
from tune.report.results import RESULTS, SEAL, check_results

TRIAL_RUNS = "trials"


def verify_search(folder: Path) -> list[Finding]:
    """Check a search: its plan, the hash chain of its ended trials, its results, and its trials' run folders."""
    return list(_findings(folder))


def _findings(folder: Path) -> Iterator[Finding]:
    with Folder.open(folder) as search_folder:
        yield finding_of(PLAN, lambda: _describe_plan(search_folder))
        try:
            trials, torn = read_trials(search_folder)
        except RayltError as error:
            yield Finding(TRIALS, False, str(error))
            return
    detail = f"{count_of(len(trials), 'trial')} in order"
    yield Finding(TRIALS, not torn, f"{detail}, and an incomplete last line" if torn else detail)
    if exists(folder / SEAL):
        yield finding_of(SEAL, lambda: _describe_results(folder))
    elif exists(folder / "trials.json"):
        yield Finding("trials.json", True, "unsealed: has no hash in seal.json")
    for trial in trials:
        if trial["failed"] is None:
            first = folder / TRIAL_RUNS / trial["trial"]
            for split in _splits_of(first, trial):
                yield from _check_run(split_folder(first, split), trial, split)
    yield from _check_open_trials(folder, {trial["trial"] for trial in trials})
    with Folder.open(folder) as search_folder:
        yield from unbound_in(search_folder, {PLAN, TRIALS, SEAL, LOCK, TRIAL_RUNS, *RESULTS})


def _check_open_trials(folder: Path, ended: set[str]) -> Iterator[Finding]:
    """Check the runs of trials without a line in trials.jsonl, because the search was interrupted or is running."""
    for path in sorted((folder / TRIAL_RUNS).glob("*")):
        if path.name.partition("-split-")[0] in ended or not is_folder(path):
            continue
        state = Files(path).state
        if state in ("stopped", "done"):
            yield from verify_inner(path, f"{TRIAL_RUNS}/{path.name}", f"{state}, of a trial that has not ended")


def _describe_plan(folder: Folder) -> str:
    plan = SearchPlan.from_json(folder.read(PLAN), str(folder.path / PLAN))
    return f"search over {', '.join(plan.spaces)}"


def _describe_results(folder: Path) -> str:
    with Folder.open(folder) as search_folder:
        return check_results(search_folder)


def _splits_of(folder: Path, trial: EndedTrialJson) -> list[int]:
    """Return the splits of a trial that have a run folder or a score."""
    named = {point.get("split", 0) for point in trial["points"]}
    return [
        split for split in range(MOST_SPLITS) if split in named or split == 0 or exists(split_folder(folder, split))
    ]


def _check_run(folder: Path, trial: EndedTrialJson, split: int) -> list[Finding]:
    """Check every file of a trial's run on one split, and its metrics in trials.jsonl."""
    what = f"{TRIAL_RUNS}/{folder.name}"
    try:
        state = _describe_run(folder, trial, split)
        return verify_inner(folder, what, state, continues=False)
    except RayltError as error:
        return [Finding(what, False, str(error))]


def _describe_run(folder: Path, trial: EndedTrialJson, split: int) -> str:
    """Describe a trial's run on one split.

    Raises:
        CheckpointError: The run's metrics differ from trials.jsonl.
    """
    files = Files(folder)
    reports = files.lines().reports
    for point in trial["points"]:
        if point.get("split", 0) != split:
            continue
        figures = reports[point["step"] - 1]["figures"] if point["step"] <= len(reports) else {}
        reported = figures.get(figures_of(point["kind"]))
        if reported is not None and reported != point["validation"]:
            raise CheckpointError(
                f"{folder}: the trial's metrics differ from its line in {TRIALS} (step {point['step']}). Restore the "
                "original files.",
                code="search.changed",
                path=str(folder),
                step=point["step"],
            )
    return f"{'done' if files.ended else 'stopped'}, {count_of(len(reports), 'step')}"
