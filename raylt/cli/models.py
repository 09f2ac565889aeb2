"""`raylt export | predict | evaluate`: the models of a run, taken out and used."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import ClientOption, Format, FormatOption, RunFolder, err, out, print_json

if TYPE_CHECKING:
    from raylt.runs.export import Prediction, TrainedModel
    from raylt.runs.graphs import GraphModel

RunOrFile = Annotated[Path, typer.Argument(metavar="RUN | FILE", help="A run folder, or a file that raylt export "
                                             "wrote.")]
MOST = 3                    # classes that a table names of one image


def export(run_folder: RunFolder, client: ClientOption = None,
           format: Annotated[Literal["safetensors", "pt2", "onnx"], typer.Option(
               help="safetensors holds weights, of all clients where they have models of their own; pt2 (torch.export) "
               "and onnx hold the computation itself, of one model.")] = "safetensors",
           to: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file; by default "
                                                   "exported.FORMAT in the run folder.")] = None) -> None:
    """Write a run's model, or those of its clients, into a file that says what it is, with a model card beside it."""
    from raylt.runs.exporting import card_of
    from raylt.runs.exporting import export as write
    path = write(run_folder, to, client=client, format=format)
    out.print(f"{path}  {card_of(path)}", soft_wrap=True)


def predict(model: RunOrFile, images: Annotated[list[Path], typer.Argument(metavar="IMAGE ...", help="Image files.")],
            client: ClientOption = None, format: FormatOption = Format.table) -> None:
    """Say what is on images; a file that raylt export wrote needs neither the run nor its data."""
    from raylt.runs.pictures import read_pictures
    trained = open_model(model, client)
    prediction = trained.predict(read_pictures(images, trained.shape, trained.fit))
    shares = _shares(prediction)
    if format is Format.json:
        print_json([{"image": str(image), "class": max(share, key=share.__getitem__), "shares": share}
                    for image, share in zip(images, shares, strict=True)])
        return
    what = "probability" if prediction.labels.ndim == 1 else "share of the pixels"
    table = Table("image", "class", what, "then", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.columns[0].overflow = "fold"
    for image, share in zip(images, shares, strict=True):
        first, *others = sorted(share.items(), key=lambda pair: -pair[1])[:MOST]
        table.add_row(str(image), first[0], f"{100 * first[1]:.1f} %",
                      ", ".join(f"{name} {100 * value:.1f} %" for name, value in others))
    out.print(table)


def evaluate(model: RunOrFile,
             data: Annotated[str, typer.Option(metavar="folder:PATH", help="New images, as <class>/<image> or "
                                               "<client>/<class>/<image>.")],
             client: ClientOption = None,
             bad: Annotated[Literal["stop", "skip"], typer.Option(help="Whether images that cannot be decoded end it, "
                                                                  "or are left out.")] = "stop",
             format: FormatOption = Format.table) -> None:
    """Judge a model on new images; where clients have models of their own, each on its client's folder."""
    from raylt.runs.evaluating import evaluate as judge
    from raylt.runs.pictures import told_of
    from raylt.runs.summary import percent
    evaluation = judge(lambda name: open_model(model, client or name), data, client is None and _has_several(model),
                       bad)
    figures = evaluation.to_json()
    for note in evaluation.notes:
        err.print(note)
    if evaluation.left_out:
        err.print(f"left out: {told_of(evaluation.left_out)}")
    if format is Format.json:
        print_json(figures)
        return
    table = Table("", "images", "accuracy", "mean of classes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_edge=False)
    for name, row in [*figures["clients"].items(), ("all", figures)]:
        table.add_row(name, str(row["images"]), percent(row["accuracy"]), percent(row["macro"]))
    out.print(table)
    table = Table("class", "images", "recall", "precision", "F1", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_edge=False)
    for row in figures["classes"]:
        table.add_row(row["class"], str(row["tested"]), *(percent(row[key]) for key in ("recall", "precision", "f1")))
    out.print(table)


def open_model(model: Path, client: str | None) -> "TrainedModel | GraphModel":
    """The model of a run folder or of an exported file."""
    if model.is_dir():
        from raylt.runs.exporting import model_of
        from raylt.runs.run import Run
        return model_of(Run.open(model), client)
    from raylt.runs.opening import load_model
    return load_model(model, client)


def _has_several(model: Path) -> bool:
    """Whether clients have models of their own."""
    if model.is_dir():
        from raylt.runs.exporting import has_client_models
        from raylt.runs.run import Run
        return has_client_models(Run.open(model))
    from raylt.runs.opening import has_several
    return has_several(model)


def _shares(prediction: "Prediction") -> list[dict[str, Any]]:
    """Of each image, the probability of each class; of a label map the share of its pixels."""
    values = prediction.probabilities
    if prediction.labels.ndim > 1:
        values = (prediction.labels[:, None] == _numbers(values.shape[1])).flatten(2).double().mean(2)
    return [dict(zip(prediction.class_names, row, strict=True)) for row in values.tolist()]


def _numbers(classes: int) -> Any:
    import torch
    return torch.arange(classes).view(1, -1, 1, 1)
