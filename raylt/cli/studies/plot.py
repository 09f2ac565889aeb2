"""The command `raylt plot`: draw runs, studies and data splits."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from raylt.cli.options import ClientOption, Format, FormatOption, RunFolder, divide, out, print_json
from raylt.cli.studies.compare import At, Level, Measures, MixVersions, Paths, SpreadOption, open_any
from raylt.disk import check_target
from raylt.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Draw a run, several runs, a study, or a split.")
Step = Annotated[int | None, typer.Option(min=1, help="Step of the evaluation; by default the last.")]
Picture = Annotated[Path | None, typer.Option(help="Write the picture here; by default into the first run folder.")]


@app.command()
def features(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="Folder of a finished run of sfd, or folders of several runs of any method over the same split.",
        ),
    ],
    picture: Picture = None,
) -> None:
    """Draw real and synthetic features of a run of sfd, or real features of several runs (t-SNE)."""
    from raylt.plots.features import draw_encoders, draw_features
    from raylt.runs.run import Run

    runs = [Run.open(folder) for folder in run_folders]
    if len(runs) == 1:
        path = _target(picture, run_folders[0] / "features.png")
        draw_features(runs[0], path)
    else:
        path = _target(picture, run_folders[0] / "encoders.png")
        draw_encoders(runs, path)
    _print_path(path)


@app.command()
def clusters(
    run_folder: RunFolder,
    round: Annotated[int | None, typer.Option(min=1, help="Round whose data were kept; by default the last.")] = None,
    picture: Picture = None,
) -> None:
    """Draw the client clusters of one round in a run of mupfl (PCA), next to the clients' classes."""
    from raylt.plots.client_groups import draw_clusters
    from raylt.runs.run import Run

    run = Run.open(run_folder)
    path = _target(picture, run_folder / "clusters.png")
    draw_clusters(run, round, path)
    _print_path(path)


@app.command()
def predictions(
    run_folder: RunFolder,
    image: Annotated[list[int] | None, typer.Option(help="Index of a test image; may be repeated.")] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME | ID",
            help="Show this client's model and view of the classes; by default the global model, or for personal "
            "methods the first client's model.",
        ),
    ] = None,
    picture: Picture = None,
) -> None:
    """Draw test images of a finished run of segmentation with true and predicted label maps."""
    from raylt.plots.predictions import draw_predictions
    from raylt.runs.run import Run

    run = Run.open(run_folder)
    path = _target(picture, run_folder / "predictions.png")
    draw_predictions(run, image or (), client, path)
    _print_path(path)


@app.command()
def clients(
    run_folders: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of finished runs over the same split.")
    ],
    metric: Annotated[
        Literal["local", "owned", "matched", "long_tailed", "global", "miou"] | None,
        typer.Option(
            help="Show the accuracy on own test images (local), over owned classes, over the own class mix (matched), "
            "or over all classes (global). long_tailed is over the class mix of all clients, and miou the mean IoU. By "
            "default local if all runs have it, otherwise owned."
        ),
    ] = None,
    picture: Picture = None,
    format: FormatOption = Format.table,
) -> None:
    """Draw and print the accuracy of every client, for one run or for several side by side."""
    from raylt.plots.clients import compare_clients, draw_clients
    from raylt.runs.run import Run

    runs = [Run.open(folder) for folder in run_folders]
    path = _target(picture, run_folders[0] / "clients.png")
    comparison = compare_clients(runs, metric)
    draw_clients(comparison, path)
    if format is Format.json:
        print_json(
            {
                "metric": comparison.metric,
                "split_sha256": comparison.split_sha256,
                "samples": comparison.sizes,
                "test_images": comparison.tested,
                "client_names": comparison.names,
                "runs": comparison.runs,
                "over_clients": comparison.spread(),
                "picture": str(path),
            }
        )
        return
    out.print(comparison.title)
    out.print(comparison.table())
    for note in comparison.notes():
        out.print(note, soft_wrap=True)
    _print_path(path)


@app.command()
def confusion(
    run_folder: RunFolder,
    client: ClientOption = None,
    step: Step = None,
    picture: Picture = None,
    format: FormatOption = Format.table,
) -> None:
    """Draw the confusion matrix of an evaluation: true classes by predicted classes."""
    from raylt.plots.classes import confusion_of, draw_confusion
    from raylt.runs.run import Run

    run = Run.open(run_folder)
    path = _target(picture, run_folder / "confusion.png")
    counts = confusion_of(run, client, step)
    draw_confusion(counts, path)
    if format is Format.json:
        print_json(
            {"title": counts.title, "class_names": counts.names, "counts": counts.matrix.tolist(), "picture": str(path)}
        )
    else:
        _print_path(path)


@app.command()
def classes(
    run_folder: RunFolder,
    client: ClientOption = None,
    step: Step = None,
    picture: Picture = None,
    format: FormatOption = Format.table,
) -> None:
    """Draw and print recall, precision, F1 and IoU of each class in an evaluation."""
    from raylt.plots.classes import confusion_of, draw_classes
    from raylt.runs.run import Run

    run = Run.open(run_folder)
    path = _target(picture, run_folder / "classes.png")
    counts = confusion_of(run, client, step)
    draw_classes(counts, path)
    if format is Format.json:
        print_json({"title": counts.title, "classes": counts.figures(), "picture": str(path)})
        return
    out.print(counts.title)
    out.print(counts.table())
    _print_path(path)


@app.command()
def data(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | FILE.yaml | recipe:NAME] [key=value ...]",
            help="Run folder; or a configuration, and settings that change it.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write the picture here; by default into the run folder, or data.png.")
    ] = None,
) -> None:
    """Draw the samples of each client and class, with their sums."""
    from raylt.config import load_data
    from raylt.data.task import build_task
    from raylt.plots.data import draw_data
    from raylt.runs.run import Run

    first, settings = divide(what)
    if first is None or not Path(first).is_dir():
        path = _target(picture, Path("data.png"))
        draw_data(build_task(load_data(first, settings)), path)
        _print_path(path)
        return
    if settings:
        raise ConfigError(
            f"{settings[0]}: cannot change the split of a run ({first}). Leave out the setting or the run folder.",
            code="config.conflict",
            key=settings[0],
        )
    run = Run.open(first)
    path = _target(picture, run.folder / "data.png")
    draw_data(run.task, path)
    _print_path(path)


@app.command()
def arms(
    paths: Paths,
    measures: Measures = None,
    at: At = None,
    reference: Annotated[str | None, typer.Option(help="Draw a line at the mean of this arm.")] = None,
    mix_versions: MixVersions = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write the picture here; by default next to the records.")
    ] = None,
) -> None:
    """Draw the arms of a study side by side: means with intervals, and the value of every seed."""
    from raylt.plots.arms import draw_arms

    opened = open_any(paths)
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    path = _target(picture, folder / "arms.png")
    comparisons = [opened.compare(measure, at, reference, mix_versions=mix_versions) for measure in measures or [None]]
    draw_arms(comparisons, path)
    _print_path(path)


@app.command()
def curves(
    paths: Paths,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            help="Draw accuracy, many, medium or few, or the client figures local, matched, owned, clients or "
            "worst_decile. Repeat it for several panels. By default the main figure of clients' own models, the "
            "accuracy, and each group with test images. Clients' own models have curves with "
            "evaluation.personal=1.",
        ),
    ] = None,
    over: Annotated[
        Literal["rounds", "bytes", "seconds"], typer.Option(help="Unit of the horizontal axis.")
    ] = "rounds",
    spread: SpreadOption = "interval",
    level: Level = 0.95,
    mix_versions: MixVersions = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Write the picture here, as .pdf, .svg or .png; by default curves.pdf next to the records."),
    ] = None,
) -> None:
    """Draw accuracy over rounds, bytes or seconds: means over seeds with intervals, at the size of a paper's column."""
    from raylt.plots.curves import caption, draw_curves

    opened = open_any(paths)
    path = _target(picture, (paths[0] if paths[0].is_dir() else paths[0].parent) / "curves.pdf")
    draw_curves(opened, measures or (), over, spread, path, level, mix_versions)
    _print_path(path)
    out.print(caption(opened, spread, level), soft_wrap=True)


def _target(picture: Path | None, default: Path) -> Path:
    """Return the file of a picture, which is checked before the picture is drawn.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = picture or default
    check_target(path, "--picture")
    return path


def _print_path(path: Path) -> None:
    out.print(str(path), soft_wrap=True)
