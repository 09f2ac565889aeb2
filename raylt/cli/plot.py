"""`raylt features | clusters | show | clients`: the commands that draw."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from raylt.errors import ConfigError, one_line

out = Console(highlight=False)


def features(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run of sfd.")]
             ) -> None:
    """Draw real and synthetic features of a finished run (t-SNE) into its folder."""
    from raylt.plots.features import draw_features
    out.print(str(draw_features(run_folder)), soft_wrap=True)


def clusters(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of mupfl.")],
             round: Annotated[int | None, typer.Option(min=1, help="One of the last; by default the last.")] = None
             ) -> None:
    """Draw the clusters of a round's clients (PCA), beside the classes that these hold, into the run's folder."""
    from raylt.plots.clusters import draw_clusters
    out.print(str(draw_clusters(run_folder, round)), soft_wrap=True)


def show(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Of segmentation, finished.")],
         image: Annotated[list[int] | None, typer.Option(help="Number of a test image; may be given several times.")
                          ] = None,
         client: Annotated[int | None, typer.Option(help="Whose own model, and classes as it sees them; else the "
                                                    "global model, or of personal methods the first client's.")] = None,
         ) -> None:
    """Draw test images, their true and their predicted label maps into a run's folder."""
    from raylt.plots.predictions import draw_predictions
    out.print(str(draw_predictions(run_folder, image or (), client)), soft_wrap=True)


def clients(run_folders: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of finished runs "
                                                              "over the same split.")],
            metric: Annotated[Literal["owned", "matched", "global", "miou"], typer.Option(
                help="Accuracy over the classes that a client owns, its own class mix or all classes; or mean IoU.")
                ] = "owned",
            picture: Annotated[Path | None, typer.Option(help="Where the bar chart goes; by default clients.png in "
                                                         "the first run folder.")] = None,
            format: Annotated[Literal["table", "json"], typer.Option(help="How to print the result.")] = "table"
            ) -> None:
    """Show and draw the accuracy of every client, of one run or of several side by side."""
    from raylt.plots.clients import compare
    found = compare(run_folders, metric)
    path = picture or run_folders[0] / "clients.png"
    try:
        found.draw(path)
    except (OSError, ValueError) as error:              # ValueError: a kind of picture that nobody knows
        raise ConfigError(f"--picture {path}: {one_line(error)}; give a .png that can be written") from None
    if format == "json":
        content = {"metric": found.metric, "split_sha256": found.split_sha256, "samples": found.sizes,
                   "runs": found.runs, "over_clients": found.spread(), "picture": str(path)}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        out.print(found.title)
        out.print(found.table())
        out.print(str(path), soft_wrap=True)
