"""`raylt compare | report | page`: what recorded runs show together, printed, drawn, or written into a page."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raylt.cli.options import out
from raylt.errors import ConfigError

if TYPE_CHECKING:
    from raylt.studies.sheet import Sheet
    from raylt.studies.study import Study

Paths = Annotated[list[Path], typer.Argument(metavar="STUDY | RUN [RUN ...]", help="The folder of a study, its "
                                             "results.json, or run folders.")]
MixVersions = Annotated[bool, typer.Option(
    "--mix-versions", help="Compare although runs were made by code that computes something else.")]
Measures = Annotated[list[str] | None, typer.Option("--measure", help="What is compared, as in accuracy, few, owned; "
                                                    "else the study's. Several side by side: give it several times.")]
At = Annotated[Literal["last", "last10", "validation", "best"] | None, typer.Option(
    help="The last round, the mean of the last ten judged, or the best on validation samples or on the test set.")]


def compare(paths: Paths, measures: Measures = None, at: At = None,
            reference: Annotated[str | None, typer.Option(help="The arm that others are compared to.")] = None,
            level: Annotated[float, typer.Option(min=0.5, max=0.999, help="Confidence of the intervals.")] = 0.95,
            target: Annotated[float | None, typer.Option(min=0, max=1, help="Also rounds, bytes and seconds until the "
                                                         "accuracy first reaches this, as in 0.8.")] = None,
            claims: Annotated[bool, typer.Option("--claims", help="Only the claims, of several studies too.")] = False,
            mix_versions: MixVersions = False,
            format: Annotated[Literal["table", "json", "markdown", "latex"], typer.Option(
                help="How to print it.")] = "table") -> None:
    """Compare arms over seeds: means with intervals, paired differences, claims, and what was left out and why."""
    from raylt.studies.tables import of_comparison, of_measures
    from raylt.studies.target import reached, with_target
    if claims:
        if measures or target is not None:
            raise ConfigError("--claims: each claim names its own measure; leave out --measure and --target")
        _compare_claims(paths, at, level, mix_versions, format)
        return
    opened = open_any(paths)
    comparisons = [opened.compare(measure, at, reference, level, mix_versions) for measure in measures or [None]]
    sheet = of_measures(comparisons) if len(comparisons) > 1 else of_comparison(comparisons[0])
    reaching = None
    if target is not None:
        reaching = reached(opened.records, target)
        sheet = with_target(sheet, reaching, target)
    if format == "json":
        content = (comparisons[0].to_json() if len(comparisons) == 1 else
                   {"schema": 1, "measures": {each.measure: each.to_json() for each in comparisons}})
        more = {} if reaching is None else {"target": [each.to_json() for each in reaching]}
        sys.stdout.write(json.dumps({**content, **more}, indent=1) + "\n")
    else:
        _print(sheet, format)


def _compare_claims(paths: Sequence[Path], at: At, level: float, mix_versions: bool, format: str) -> None:
    from raylt.studies.tables import of_claims
    studies = [open_any([path]) for path in paths]
    found = {each.definition.name: each.compare(None, at, None, level, mix_versions) for each in studies}
    if len(found) < len(studies):
        names = [each.definition.name for each in studies]
        raise ConfigError(f"--claims: {max(names, key=names.count)} is given twice; give each study once")
    if format == "json":
        content = {"schema": 1, "claims": {name: each.to_json()["claims"] for name, each in found.items()}}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        _print(of_claims(found), format)


def _print(sheet: "Sheet", format: str) -> None:
    if format == "table":
        out.print(sheet.screen())
    else:
        sys.stdout.write(sheet.markdown() if format == "markdown" else sheet.latex())


def report(paths: Paths,
           to: Annotated[Path | None, typer.Option(help="The file; by default report.html in the folder.")] = None,
           mix_versions: MixVersions = False) -> None:
    """Draw a study or runs into one HTML file: tables, curves, groups, clients, costs, versions and departures."""
    from raylt.studies.report import write_report
    opened = open_any(paths)
    where = to or (paths[0] if paths[0].is_dir() else paths[0].parent) / "report.html"
    out.print(str(write_report(opened, where, mix_versions)), soft_wrap=True)


def open_any(paths: Sequence[Path]) -> "Study":
    """A study, its results, or run folders as a study of their own.

    Raises:
        ConfigError: a study is among several paths; CheckpointError: something is neither.
    """
    from raylt.studies.single import of_runs
    from raylt.studies.study import FILE, Study
    if len(paths) == 1 and not (paths[0] / "config.yaml").is_file():
        return Study.open(paths[0])
    for path in paths:
        if path.suffix == ".json" or (path / FILE).is_file():
            raise ConfigError(f"{path}: is a study, which is read by itself; give it alone, or run folders only")
    return of_runs(list(paths))
