"""`raylt plot features | clusters | predictions | clients | confusion | classes | data | arms`: the commands that draw.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from raylt.cli.compare import At, Measures, MixVersions, Paths, open_any
from raylt.cli.options import ClientOption, Format, FormatOption, RunFolder, divide, out, print_json
from raylt.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Draw a run, several runs, a study, or a split.")
Step = Annotated[int | None, typer.Option(min=1, help="The step after which was judged; by default the last that was.")]
Picture = Annotated[Path | None, typer.Option(help="Where the picture goes; by default into the first run folder.")]


@app.command()
def features(run_folders: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="The folder of a finished "
                                                               "run of sfd; or those of several runs, of any method, "
                                                               "over the same split.")],
             picture: Picture = None) -> None:
    """Draw real and synthetic features of a run of sfd, or the real ones of several runs' encoders (t-SNE)."""
    from raylt.plots.features import draw_encoders, draw_features
    from raylt.runs.run import Run
    runs = [Run.open(folder) for folder in run_folders]
    if len(runs) == 1:
        _say(draw_features(runs[0], picture))
    else:
        _say(draw_encoders(runs, picture or run_folders[0] / "encoders.png"))


@app.command()
def clusters(run_folder: RunFolder,
             round: Annotated[int | None, typer.Option(min=1, help="The round, one of the last; by default the last.")
                              ] = None, picture: Picture = None) -> None:
    """Draw the clusters of a round's clients in a run of mupfl (PCA), beside the classes that these hold."""
    from raylt.plots.clusters import draw_clusters
    from raylt.runs.run import Run
    _say(draw_clusters(Run.open(run_folder), round, picture))


@app.command()
def predictions(run_folder: RunFolder,
                image: Annotated[list[int] | None, typer.Option(help="The number of a test image; may be given several "
                                                                "times.")] = None,
                client: Annotated[str | None, typer.Option(
                    metavar="NAME | ID", help="The client whose own model, and view of the classes, is shown; by "
                    "default the global model, or the first client's of personal methods.")] = None,
                picture: Picture = None) -> None:
    """Draw test images of a finished run of segmentation with their true and their predicted label maps."""
    from raylt.plots.predictions import draw_predictions
    from raylt.runs.run import Run
    _say(draw_predictions(Run.open(run_folder), image or (), client, picture))


@app.command()
def clients(run_folders: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of finished runs "
                                                              "over the same split.")],
            metric: Annotated[Literal["local", "owned", "matched", "global", "miou"] | None, typer.Option(
                help="Accuracy on the client's own test images, over the classes that it owns, over its own class mix "
                "or over all classes; or mean IoU. By default the first of these that there is.")] = None,
            picture: Picture = None, format: FormatOption = Format.table) -> None:
    """Draw and print the accuracy of every client, of one run or of several side by side."""
    from raylt.plots.clients import compare, draw_clients
    from raylt.runs.run import Run
    comparison = compare([Run.open(folder) for folder in run_folders], metric)
    path = draw_clients(comparison, picture or run_folders[0] / "clients.png")
    if format is Format.json:
        print_json({"metric": comparison.metric, "split_sha256": comparison.split_sha256, "samples": comparison.sizes,
                    "client_names": comparison.names, "runs": comparison.runs, "over_clients": comparison.spread(),
                    "picture": str(path)})
        return
    out.print(comparison.title)
    out.print(comparison.table())
    _say(path)


@app.command()
def confusion(run_folder: RunFolder, client: ClientOption = None, step: Step = None, picture: Picture = None,
              format: FormatOption = Format.table) -> None:
    """Draw what is taken for what: true classes by predicted ones, of the last evaluation or of another."""
    from raylt.plots.classes import confusion_of, draw_confusion
    from raylt.runs.run import Run
    counts = confusion_of(Run.open(run_folder), client, step)
    path = draw_confusion(counts, picture or run_folder / "confusion.png")
    if format is Format.json:
        print_json({"title": counts.title, "class_names": counts.names, "counts": counts.matrix.tolist(),
                    "picture": str(path)})
    else:
        _say(path)


@app.command()
def classes(run_folder: RunFolder, client: ClientOption = None, step: Step = None, picture: Picture = None,
            format: FormatOption = Format.table) -> None:
    """Draw and print recall, precision, F1 and IoU of each class, of the last evaluation or of another."""
    from raylt.plots.classes import confusion_of, draw_classes
    from raylt.runs.run import Run
    counts = confusion_of(Run.open(run_folder), client, step)
    path = draw_classes(counts, picture or run_folder / "classes.png")
    if format is Format.json:
        print_json({"title": counts.title, "classes": counts.figures(), "picture": str(path)})
        return
    out.print(counts.title)
    out.print(counts.table())
    _say(path)


@app.command()
def data(what: Annotated[list[str] | None, typer.Argument(
             metavar="[RUN | FILE.yaml | recipe:NAME] [key=value ...]", help="A run folder; or a configuration, then "
             "settings that change it.")] = None,
         picture: Annotated[Path | None, typer.Option(help="Where the picture goes; by default into the run folder, or "
                                                      "here.")] = None) -> None:
    """Draw who holds what: clients by classes, with their sums."""
    from raylt.config import load_data
    from raylt.data.task import build_task
    from raylt.plots.data import draw_data
    from raylt.runs.run import Run
    first, settings = divide(what)
    if first is None or not Path(first).is_dir():
        _say(draw_data(build_task(load_data(first, settings)), picture or Path("data.png")))
        return
    if settings:
        raise ConfigError(f"{settings[0]}: the split of a run is as it is; leave it out, or name no run folder")
    run = Run.open(first)
    _say(draw_data(run.task, picture or run.folder / "data.png"))


@app.command()
def arms(paths: Paths, measures: Measures = None, at: At = None,
         reference: Annotated[str | None, typer.Option(help="The arm at whose mean a line stands.")] = None,
         mix_versions: MixVersions = False,
         picture: Annotated[Path | None, typer.Option(help="Where the picture goes; by default beside the records.")
                            ] = None) -> None:
    """Draw the arms of a study side by side: means with intervals, and every seed's value."""
    from raylt.plots.arms import draw_arms
    opened = open_any(paths)
    comparisons = [opened.compare(measure, at, reference, mix_versions=mix_versions) for measure in measures or [None]]
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    _say(draw_arms(comparisons, picture or folder / "arms.png"))


def _say(path: Path) -> None:
    out.print(str(path), soft_wrap=True)
