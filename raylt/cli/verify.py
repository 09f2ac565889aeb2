"""The command `raylt verify`: check runs, searches, studies and record files, and sign them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, err, out, print_json
from raylt.cli.searches.ray_tune import is_one as is_one_of_ray
from raylt.disk import exists, is_file, is_folder
from raylt.errors import CheckpointError, ConfigError, RayltError

if TYPE_CHECKING:
    from raylt.runs.verify import Finding


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN | SEARCH | STUDY | RESULTS.json",
            help="Folder that raylt created, or a file of recorded results.",
        ),
    ],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Remove leftovers of killed processes, and damaged files that an intact checkpoint can replace; "
            "rewrite a damaged model from the last checkpoint.",
        ),
    ] = False,
    seal: Annotated[bool, typer.Option("--seal", help="Add seals to a record from an older version.")] = False,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="KEY", help="Sign the results with this SSH key, if all files are intact."),
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option("--signers", metavar="FILE", help="Require a signature by an allowed signer in this file."),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Check every file of a run, search, study or record against its hash; exit with 2 if one is damaged."""
    kind = _kind(path)
    if repair:
        _only_for("run", kind, "--repair", path)
        from raylt.runs.verify import repair as mend

        for line in mend(path):
            err.print(line, soft_wrap=True)
    if seal:
        _only_for("record", kind, "--seal", path)
        from raylt.studies.records.recorded_runs import seal_results

        for line in seal_results(path):
            err.print(line, soft_wrap=True)
    findings = _findings(kind, path)
    file = path if kind == "record" else path / SIGNED[kind]
    if sign is not None:
        _sign(findings, file, sign)
    findings += _signature(file, signers)
    _print(findings, format)
    if not all(finding.whole for finding in findings):
        raise typer.Exit(2)


SIGNED = {"run": "summary.json", "search": "trials.jsonl", "study": "results.json"}


def _kind(path: Path) -> str:
    """Return the kind of a folder: "run", "search", "study" or "record".

    Raises:
        CheckpointError: The path does not exist, or is neither a folder nor a record.
    """
    if not exists(path):
        raise CheckpointError(
            f"{path}: no such file or folder. Give a folder that raylt created, or a record.",
            code="file.not-found",
            path=str(path),
        )
    if path.suffix == ".json" and not is_folder(path):
        return "record"
    if not is_folder(path):
        raise CheckpointError(
            f"{path}: is not a folder, and not a record. Give a folder that raylt created, or a record (.json).",
            code="file.malformed",
            path=str(path),
        )
    if is_file(path / "study.yaml"):
        return "study"
    if is_one_of_ray(path):
        raise ConfigError(
            f"{path}: is a search with a scheduler of Ray Tune, whose files have no hashes to check. Give a run, a "
            "study, a record, or a search with --scheduler asha or none.",
            code="search.not-verifiable",
            path=str(path),
        )
    return "search" if is_file(path / "search.json") else "run"


def _findings(kind: str, path: Path) -> "list[Finding]":
    if kind == "record":
        from raylt.studies.verify import verify_results

        return verify_results(path)
    if kind == "study":
        from raylt.studies.verify import verify_study

        return verify_study(path) + _searches_of(path)
    if kind == "search":
        from tune.verify import verify_search

        return verify_search(path)
    from raylt.runs.verify import verify as verify_run

    return verify_run(path)


def _searches_of(study: Path) -> "list[Finding]":
    """Return the findings on a study's searches: each damaged file, or one line for an intact search."""
    from raylt.runs.verify import Finding
    from raylt.studies.cells import slug
    from raylt.studies.running.tuning import read_tuned
    from tune.verify import verify_search

    try:
        tuned = read_tuned(study)
    except RayltError:  # `verify_study` reports this
        return []
    findings: list[Finding] = []
    for name in (f"{slug(cell)}/{slug(arm)}/search".lstrip("/") for cell, arms in tuned.items() for arm in arms):
        if not is_folder(study / name):  # taken from a record, or nothing was searched
            continue
        try:
            of_search = verify_search(study / name)
        except RayltError as error:
            of_search = [Finding(study.name, False, str(error))]
        damaged = [Finding(f"{name}/{each.what}", False, each.detail) for each in of_search if not each.whole]
        findings += damaged or [Finding(name, True, "a search, as recorded")]
    return findings


def _only_for(expected: str, kind: str, option: str, path: Path) -> None:
    if kind != expected:
        raise ConfigError(
            f"{option}: is for a {expected} ({path} is a {kind}). Leave it out.",
            code="config.conflict",
            key=option,
            path=str(path),
        )


def _sign(findings: "list[Finding]", file: Path, key: Path) -> None:
    from raylt.runs.signature import sign
    from raylt.runs.verify import LAST_MISSING

    needed = [finding for finding in findings if finding.detail != LAST_MISSING]
    doubtful = [finding.what for finding in needed if not (finding.whole and finding.checked)]
    if doubtful:
        raise ConfigError(
            f"--sign: files are damaged or not checked ({', '.join(doubtful[:3])}). Restore the originals, and provide "
            "what the checks need.",
            code="signature.not-made",
            key="--sign",
            path=str(file),
        )
    if not is_file(file):
        raise ConfigError(
            f"--sign: the results do not exist yet ({file}). Finish the run, search or study.",
            code="signature.not-made",
            key="--sign",
            path=str(file),
        )
    err.print(f"wrote {sign(file, key)}", soft_wrap=True)


def _signature(file: Path, signers: Path | None) -> "list[Finding]":
    """Return the finding on a file's signature, or an empty list if there is no signature and none is required."""
    from raylt.runs.signature import check_signature, signature_of
    from raylt.runs.verify import Finding

    path = signature_of(file)
    if not os.path.lexists(path):
        return [] if signers is None else [Finding(path.name, False, "missing: it is not signed")]
    try:
        return [Finding(path.name, True, check_signature(file, signers))]
    except RayltError as error:
        return [Finding(path.name, False, str(error))]


def _print(findings: "list[Finding]", format: Format) -> None:
    if format is Format.json:
        print_json([vars(finding) for finding in findings])
        return
    table = Table("file", "state", "content", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.columns[2].overflow = "fold"
    for finding in findings:
        mend = f"; --repair would {finding.mendable}" if finding.mendable else ""
        detail = finding.detail.removeprefix("unsealed: ")
        table.add_row(finding.what, _state(finding), f"{detail.removesuffix('.') if mend else detail}{mend}")
    out.print(table)


def _state(finding: "Finding") -> str:
    """Return the state of a file as one word or two."""
    if not finding.whole:
        return "DAMAGED"
    if not finding.checked:
        return "not checked"
    return "unsealed" if finding.detail.startswith("unsealed: ") else "intact"
