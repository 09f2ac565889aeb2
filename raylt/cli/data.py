"""`raylt data`: who holds what."""

from pathlib import Path
from typing import Annotated

import typer

from raylt.cli.options import Format, FormatOption, Settings, divide, out, print_json
from raylt.config import load_data
from raylt.errors import CheckpointError, ConfigError


def data(settings: Settings = None,
         export: Annotated[Path | None, typer.Option(help="The file that the split is written to.")] = None,
         split: Annotated[Path | None, typer.Option("--import", help="The file of a split to use instead of drawing "
                                                    "one.")] = None,
         format: FormatOption = Format.table) -> None:
    """Build the split of a configuration and show who holds what."""
    from raylt.data.task import build_task
    config = load_data(*divide(settings))
    if split is not None:
        config = config.model_copy(update={"split": str(split)})
    task = build_task(config)
    if export is not None:
        try:
            task.split.save(export)
        except CheckpointError as error:
            raise ConfigError(f"--export {error}; give a file that can be written") from None
    if format is Format.json:
        print_json({"sha256": task.split.sha256, "names": task.class_names, "groups": task.groups,
                    "classes": task.counts.tolist(), "clients": task.client_counts.tolist()})
        return
    from raylt.runs.summary import split_table
    out.print(f"split {task.split.sha256}", soft_wrap=True)
    out.print(split_table(task, out.width))
    unit = {"classification": "samples", "segmentation": "pixels"}[task.kind]
    for group in ("many", "medium", "few"):
        sizes = [int(n) for n, its in zip(task.counts, task.groups, strict=True) if its == group]
        out.print(f"{group}: {len(sizes)} classes, {sum(sizes)} {unit}")
