"""The commands `raylt export | predict | evaluate`: export the models of a run, and use exported models."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import ClientOption, Format, FormatOption, RunFolder, err, out, print_json
from raylt.disk import is_folder
from raylt.errors import ConfigError

RunOrFile = Annotated[Path, typer.Argument(metavar="RUN | FILE", help="Run folder, or a file that raylt export wrote.")]
SHOWN_CLASSES = 3  # number of classes per image in a table


def export(
    run_folder: RunFolder,
    client: ClientOption = None,
    format: Annotated[
        Literal["safetensors", "pt2", "onnx"],
        typer.Option(
            help="Format of the file. safetensors contains weights, also of all personal models; pt2 (torch.export) "
            "and onnx contain the computation graph of one model."
        ),
    ] = "safetensors",
    round: Annotated[
        str | None,
        typer.Option(
            metavar="R | best",
            help="Write the model of this round, which must have a checkpoint; best is the round with the highest "
            "accuracy on validation images. By default the last step.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write to this file; by default exported.FORMAT in the run folder, named after the given client and "
            "round.",
        ),
    ] = None,
) -> None:
    """Write the model of a run, or the models of its clients, to a file with a model card next to it."""
    from raylt.runs.export.export import card_of
    from raylt.runs.export.export import export as write

    path = write(run_folder, to, client=client, format=format, round=_round(round))
    if round is None:
        _say_if_unfinished(run_folder)
    out.print(f"{path}  {card_of(path)}", soft_wrap=True)


def _round(text: str | None) -> int | Literal["best"] | None:
    if text is None or text == "best":
        return text
    if not text.isdecimal():
        raise ConfigError(
            f"--round: is neither a number nor best ({text}). Give the number of a round.",
            code="config.wrong-type",
            key="--round",
            value=text,
        )
    return int(text)


def predict(
    model: RunOrFile,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE ...", help="Image files.")],
    client: ClientOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Classify images with the model of a run, or of an exported file, which needs neither the run nor its data."""
    from raylt.runs.export.load import load_images, load_model

    trained = load_model(model, client)
    _say_if_unfinished(model)
    prediction = trained.predict(load_images(images, trained.shape, trained.fit, trained.depth))
    shares = prediction.shares
    if format is Format.json:
        print_json(
            [
                {"image": str(image), "class": max(share, key=share.__getitem__), "shares": share}
                for image, share in zip(images, shares, strict=True)
            ]
        )
        return
    what = "probability" if prediction.labels.ndim == 1 else "share of the pixels"
    table = Table("image", "class", what, "next classes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.columns[0].overflow = "fold"
    for image, share in zip(images, shares, strict=True):
        first, *others = sorted(share.items(), key=lambda pair: -pair[1])[:SHOWN_CLASSES]
        table.add_row(
            str(image),
            first[0],
            f"{100 * first[1]:.1f} %",
            ", ".join(f"{name} {100 * value:.1f} %" for name, value in others),
        )
    out.print(table)


def evaluate(
    model: RunOrFile,
    data: Annotated[
        str, typer.Option(metavar="folder:PATH", help="New images, as <class>/<image> or <client>/<class>/<image>.")
    ],
    client: ClientOption = None,
    bad: Annotated[
        Literal["stop", "skip"], typer.Option(help="Stop at images that cannot be decoded, or skip them.")
    ] = "stop",
    format: FormatOption = Format.table,
) -> None:
    """Evaluate a model on new images, and each personal model on its client's folder."""
    from raylt.formatting import percent
    from raylt.runs.export.evaluate import evaluate as judge
    from raylt.runs.export.load import describe_faults, load_model

    evaluation = judge(
        lambda name: load_model(model, client or name),
        data,
        client is None and _has_several(model),
        bad,
        _joining(model),
    )
    _say_if_unfinished(model)
    figures = evaluation.to_json()
    for note in evaluation.notes:
        err.print(note)
    if evaluation.left_out:
        err.print(f"left out: {describe_faults(evaluation.left_out)}")
    if format is Format.json:
        print_json(figures)
        return
    table = Table(
        "", "images", "accuracy", "mean of classes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for name, row in [*figures["clients"].items(), ("all", figures)]:
        table.add_row(name, str(row["images"]), _with_interval(row), percent(row["macro"]))
    out.print(table)
    table = Table(
        "class", "images", "recall", "precision", "F1", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for row in figures["classes"]:
        table.add_row(row["class"], str(row["tested"]), *(percent(row[key]) for key in ("recall", "precision", "f1")))
    out.print(table)


def _with_interval(figures: dict[str, Any]) -> str:
    """Return an accuracy in percent as text, with its confidence interval if it is based on few images."""
    from raylt.formatting import interval_text, percent
    from raylt.metrics import FEW_SAMPLES

    accuracy, images = figures["accuracy"], figures["images"]
    if accuracy is None or images >= FEW_SAMPLES:
        return percent(accuracy)
    return f"{percent(accuracy)} ({interval_text(accuracy, images)})"


def _say_if_unfinished(model: Path) -> None:
    """Print one line if the model comes from a run folder whose run is not finished."""
    if not is_folder(model):
        return
    from raylt.runs.export.export import unfinished
    from raylt.runs.run import Run

    stage = unfinished(Run.open(model))
    if stage is not None:
        err.print(f"{model}: the run is not finished; its model is from {stage}", soft_wrap=True)


def _has_several(model: Path) -> bool:
    """Return whether a run folder or exported file has a separate model for each client."""
    if is_folder(model):
        from raylt.runs.export.export import has_client_models
        from raylt.runs.run import Run

        return has_client_models(Run.open(model))
    from raylt.runs.export.load import has_several_models

    return has_several_models(model)


def _joining(model: Path) -> list[str]:
    """Return the names of clients that join a run after training, and have no models; an exported file has none."""
    if not is_folder(model):
        return []
    from raylt.runs.export.export import joining_clients_of
    from raylt.runs.run import Run

    return [name for _, name in joining_clients_of(Run.open(model))]
