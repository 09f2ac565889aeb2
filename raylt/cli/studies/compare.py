"""The commands `raylt compare | rank | report`: print or draw comparisons of runs."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raylt import store
from raylt.cli.options import out
from raylt.disk import check_target, is_file
from raylt.errors import ConfigError
from raylt.runs.callbacks.console import UNSAFE

if TYPE_CHECKING:
    from raylt.studies.report.text_table import TextTable
    from raylt.studies.study import Study

Paths = Annotated[
    list[Path],
    typer.Argument(metavar="STUDY | RUN [RUN ...]", help="Folder of a study, its results.json, or run folders."),
]
MixVersions = Annotated[
    bool, typer.Option("--mix-versions", help="Compare runs although several versions of the code made them.")
]
Measures = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        help="Compare by this measure, such as accuracy, few or owned, instead of the study's. Repeat it to show "
        "several measures in one table.",
    ),
]
At = Annotated[
    Literal["last", "last10", "validation", "best"] | None,
    typer.Option(
        help="Use the last round, the mean of the last ten evaluated rounds, or the best round on validation samples "
        "or on the test set."
    ),
]

Costs = Annotated[
    bool, typer.Option("--costs", help="Also measure the passes of each arm on a tiny run; takes minutes.")
]
Level = Annotated[float, typer.Option(min=0.5, max=0.999, help="Confidence of the intervals.")]

SpreadOption = Annotated[
    Literal["interval", "sd"],
    typer.Option(
        "--spread",
        help="Show the t interval of each mean after ± or as a band, or one standard deviation.",
    ),
]
LEVEL = 0.95  # default confidence

# Studies opened inside `results_read_once`, by path.
_opened: ContextVar[dict[Path, "Study"] | None] = ContextVar("opened", default=None)


def compare(
    paths: Paths,
    measures: Measures = None,
    at: At = None,
    reference: Annotated[str | None, typer.Option(help="Compare the other arms to this reference arm.")] = None,
    level: Level = LEVEL,
    spread: SpreadOption = "interval",
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Also print the rounds, bytes and seconds until the first measure reaches this value, such as 0.8.",
        ),
    ] = None,
    costs: Costs = False,
    claims: Annotated[bool, typer.Option("--claims", help="Print only the claims, also for several studies.")] = False,
    mix_versions: MixVersions = False,
    format: Annotated[
        Literal["table", "json", "markdown", "latex"], typer.Option(help="Format of the comparison.")
    ] = "table",
) -> None:
    """Compare arms over seeds: print means with intervals, paired differences, claims, and excluded runs.

    In LaTeX, the best mean of a column is bold, the second-best underlined, and comments contain the facts for a
    caption.
    """
    from raylt.studies.analysis.time_to_accuracy import reached, with_passes
    from raylt.studies.report.comparison_tables import comparison_table, measures_table, with_costs, with_target

    if claims:
        if measures or target is not None or costs:
            raise ConfigError(
                "--claims: each claim names its own measure. Leave out --measure, --target and --costs.",
                code="config.conflict",
                key="--claims",
            )
        _compare_claims(paths, at, level, mix_versions, format)
        return
    opened = open_any(paths)
    several = len(measures or ()) > 1
    comparisons = [
        opened.compare(measure, at, reference, level, mix_versions, may_lack=several) for measure in measures or [None]
    ]
    if several and not any(comparison.rows for comparison in comparisons):
        opened.compare(comparisons[0].measure, at, reference, level, mix_versions)  # raises an error with the reason
    table = measures_table(comparisons, spread) if len(comparisons) > 1 else comparison_table(comparisons[0], spread)
    passes = _passes(opened) if costs else {}
    reaching = None
    if target is not None:
        first = comparisons[0].measure
        reaching = with_passes(reached(opened.records, target, first), passes)
        table = with_target(table, reaching, target, first)
    if costs:
        table = with_costs(table, passes)
    if format != "json":
        _print(table, format)
        return
    if len(comparisons) == 1:
        content = comparisons[0].to_json()
    else:
        content = {"schema": 1, "measures": {each.measure: each.to_json() for each in comparisons}}
    if reaching is not None:
        content["target"] = [each.to_json() for each in reaching]
    if costs:
        content["costs"] = [{"cell": cell, "arm": arm, "passes": each} for (cell, arm), each in passes.items()]
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


def rank(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="STUDY ...", help="Folders of studies, or their results.json; or run folders, which are one study."
        ),
    ],
    measure: Annotated[str, typer.Option(help="Rank by this measure, such as accuracy, few or matched.")] = "accuracy",
    at: At = None,
    level: Level = LEVEL,
    to: Annotated[
        Path | None, typer.Option(help="Also write a page in Markdown to this file, and its picture next to it.")
    ] = None,
    costs: Costs = False,
    mix_versions: MixVersions = False,
    format: Annotated[
        Literal["table", "json", "markdown", "latex"], typer.Option(help="Format of the ranking.")
    ] = "table",
) -> None:
    """Rank the arms of studies by paired comparisons over benchmarks and seeds, with intervals."""
    from raylt.studies.analysis.ranking import rank as ranked
    from raylt.studies.analysis.ranking import with_costs
    from raylt.studies.report.leaderboard import leaderboard_page, ranking_svg, ranking_table

    if to is not None:
        check_target(to, "--to")
        _check_suffix(to)
    studies = _by_name(paths, "STUDY")
    for study in studies.values():
        study.check_comparable(mix_versions)
    records = {name: study.records for name, study in studies.items()}
    ranking = ranked(records, measure, at or "last", level)
    ranking = with_costs(ranking, records) if costs else ranking
    if format == "json":
        sys.stdout.write(json.dumps(ranking.to_json(), indent=1) + "\n")
    else:
        _print(ranking_table(ranking), format)
    if to is not None:
        picture = to.with_suffix(".svg")
        command = _rank_command(paths, measure, at, level, costs, mix_versions, to)
        with store.Folder.open(to.parent) as folder:
            folder.write(picture.name, ranking_svg(ranking))
            folder.write(to.name, leaderboard_page(ranking, picture.name, command))


def _check_suffix(page: Path) -> None:
    """Check that the page of a ranking does not have the name of its picture.

    Raises:
        ConfigError: Both would be the same file.
    """
    if page.suffix.lower() == ".svg":
        raise ConfigError(
            f"--to: the picture of the page would be the same file ({page}). Give the page another suffix, such as "
            ".md.",
            code="config.conflict",
            key="--to",
            path=str(page),
        )


def _rank_command(
    paths: Sequence[Path], measure: str, at: At, level: float, costs: bool, mix_versions: bool, to: Path
) -> str:
    """Return the command that writes a leaderboard page, with this process's plugins. Defaults are left out."""
    from raylt.own_code.commands import plugin_options

    options = [*plugin_options(), "--measure", measure]
    options += [] if at is None else ["--at", at]
    options += [] if level == LEVEL else ["--level", f"{level:g}"]
    options += ["--costs"] if costs else []
    options += ["--mix-versions"] if mix_versions else []
    options += ["--to", str(to)]
    return f"{shlex.join(['raylt', 'rank', *map(str, paths)])} \\\n    {shlex.join(options)}"


def report(
    paths: Paths,
    to: Annotated[Path | None, typer.Option(help="Write to this file; by default report.html in the folder.")] = None,
    mix_versions: MixVersions = False,
) -> None:
    """Draw a study or runs into one HTML file: tables, curves, groups, clients, costs, versions and departures."""
    from raylt.studies.report.html import write_report

    opened = open_any(paths)
    path = to or (paths[0] if paths[0].is_dir() else paths[0].parent) / "report.html"
    check_target(path, "--to")
    out.print(str(write_report(opened, path, mix_versions)), soft_wrap=True)


def open_any(paths: Sequence[Path]) -> "Study":
    """Open paths as one study: a study's folder, a results file, or run folders.

    Raises:
        ConfigError: A study is among several paths.
        CheckpointError: A path is neither a study nor a run folder.
    """
    from raylt.studies.study import FILE, of_runs

    if len(paths) == 1 and not _is_run(paths[0]):
        return _open_study(paths[0])
    for path in paths:
        if path.suffix == ".json" or is_file(path / FILE):
            raise ConfigError(
                f"{path}: a study cannot be compared with other paths. Give the study alone, or only run folders.",
                code="config.conflict",
                path=str(path),
            )
    return of_runs(list(paths))


@contextmanager
def results_read_once() -> Iterator[None]:
    """Read and check each study only once inside the block, even if several comparisons open it."""
    token = _opened.set({})
    try:
        yield
    finally:
        _opened.reset(token)


def _is_run(path: Path) -> bool:
    return is_file(path / "config.yaml")


def _open_study(path: Path) -> "Study":
    from raylt.studies.study import Study

    studies = _opened.get()
    if studies is None:
        return Study.open(path)
    if path not in studies:
        studies[path] = Study.open(path)
    return studies[path]


def _compare_claims(paths: Sequence[Path], at: At, level: float, mix_versions: bool, format: str) -> None:
    from raylt.studies.report.comparison_tables import claims_table

    studies = _by_name(paths, "--claims")
    comparisons = {name: study.compare(None, at, None, level, mix_versions) for name, study in studies.items()}
    if format == "json":
        content = {"schema": 1, "claims": {name: each.to_json()["claims"] for name, each in comparisons.items()}}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        _print(claims_table(comparisons), format)


def _by_name(paths: Sequence[Path], subject: str) -> dict[str, "Study"]:
    """Open studies, and return them by name.

    Args:
        paths: Folders of studies, or their results files. Run folders are one study together.
        subject: Argument or option that takes the studies, for the error.

    Raises:
        ConfigError: Two studies have the same name.
    """
    runs = [path for path in paths if _is_run(path)]
    studies: dict[str, Study] = {}
    for group in [*([path] for path in paths if path not in runs), *([runs] if runs else [])]:
        study = open_any(group)
        name = study.definition.name
        if name in studies:
            raise ConfigError(
                f"{subject}: two studies have the same name ({name}). Give each study once, or give one another name.",
                code="config.conflict",
                key=subject,
                name=name,
            )
        studies[name] = study
    return studies


def _passes(study: "Study") -> dict[tuple[str, str], float | None]:
    """Return the passes of a study's arms. Only this function imports torch."""
    from raylt.studies.analysis.costs import passes_by_arm

    return passes_by_arm(study.records)


def _print(table: "TextTable", format: str) -> None:
    if format == "table":
        out.print(table.screen())
    else:
        text = table.markdown() if format == "markdown" else table.latex()
        sys.stdout.write(UNSAFE.sub("?", text))
