"""The command `raylt attack`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, RunFolder, out, print_json
from raylt.disk import check_target

COLUMNS = ("upload", "attack", "n", "SSIM", "PSNR", "MAE", "identified", "control", "average")
LIMITS = (
    "A low figure is not a proof: other attacks, or other outside images, may reach more. docs/privacy.md describes "
    "each attack."
)


def attack(
    run_folder: RunFolder,
    upload: Annotated[
        str | None,
        typer.Option(
            help="Attack only this upload: update, means, counts, gradients, activations, effective or synthetic, as "
            "the method has them; or features, for reference."
        ),
    ] = None,
    outside: Annotated[
        str | None, typer.Option(help="Train decoders on images of this source; by default on the run's test set.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes of a decoder over these images.")] = 60,
    picture: Annotated[Path | None, typer.Option(help="Write pictures to this folder; by default the run's.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Attack the uploads of a finished run: reconstruct training images, and print their distance to the originals."""
    from raylt.privacy.attack import attack as attack_run
    from raylt.privacy.attacker_view import not_attacked, uploads_of
    from raylt.privacy.picture import draw
    from raylt.runs.run import Run

    run = Run.open(run_folder)
    check_target((picture or run_folder) / "attack.png", "--picture")
    findings = attack_run(run, upload, outside, epochs)
    attacked = {finding.upload for finding in findings}
    left = [*(name for name in uploads_of(run.method) if name not in attacked), *not_attacked(run.method.name)]
    pictures = [
        None
        if finding.shown is None
        else str(draw(finding, (picture or run_folder) / f"attack_{finding.upload}_{number}.png"))
        for number, finding in enumerate(findings)
    ]
    if format is Format.json:
        print_json(
            {
                "findings": [_plain(finding, file) for finding, file in zip(findings, pictures, strict=True)],
                "not_attacked": left,
                "limits": LIMITS,
            }
        )
        return
    out.print(_table(findings))
    out.print(
        "identified: share of reconstructions closer to their own image than to any other image of their class. "
        "control: SSIM of a decoder trained on shuffled pairs, or of another update. average: SSIM of the class's mean "
        f"outside image. {LIMITS}",
        soft_wrap=True,
    )
    out.print(f"Uploads of {run.method.name} that were not attacked: {', '.join(left)}.", soft_wrap=True)
    for file in pictures:
        if file:
            out.print(file, soft_wrap=True)


def _table(findings: Iterable[Any]) -> Table:
    """Return a table of the findings, one row per upload and attack."""
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.columns[1].overflow = "fold"
    for finding in findings:
        reached = finding.reached
        if reached is None:
            figures = [f"right: {finding.guessed:.2f} (0.50 by chance)"]
        else:
            figures = [
                f"{reached.ssim:.2f}",
                f"{reached.psnr:.1f}",
                f"{reached.mae:.3f}",
                "-" if reached.identified is None else f"{reached.identified:.2f}",
                *(f"{other.ssim:.2f}" for other in (finding.control, finding.average) if other),
            ]
        table.add_row(finding.upload, finding.what, str(finding.count), *figures)
    return table


def _plain(finding: Any, file: str | None) -> dict[str, Any]:
    named = {
        name: value._asdict() if value is not None else None
        for name, value in (("reached", finding.reached), ("control", finding.control), ("average", finding.average))
    }
    return {
        "upload": finding.upload,
        "what": finding.what,
        "count": finding.count,
        "guessed": finding.guessed,
        "picture": file,
        **named,
    }
