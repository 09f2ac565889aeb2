"""`raylt show`: the command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out = Console(highlight=False)


def show(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Of segmentation, finished.")],
         image: Annotated[list[int] | None, typer.Option(help="Number of a test image; may be given several times.")
                          ] = None,
         client: Annotated[int | None, typer.Option(help="Whose own model, and classes as it sees them; else the "
                                                    "global model, or of personal methods the first client's.")] = None,
         ) -> None:
    """Draw test images, their true and their predicted label maps into a run's folder."""
    from raylt.gallery import draw_predictions
    out.print(str(draw_predictions(run_folder, image or (), client)), soft_wrap=True)
