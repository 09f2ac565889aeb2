"""The command `raylt attack`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, RunFolder, out, print_json
from raylt.disk import check_target

COLUMNS = ("", "upload", "n", "SSIM", "PSNR", "MAE", "identified", "control", "average")
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
    for number, finding in enumerate(findings):
        out.print(f"{number} {finding.upload}: {finding.what}", soft_wrap=True)
    guesses = "right: balanced share of right guesses, 0.50 by chance. " if _guesses(findings) else ""
    out.print(
        f"{guesses}identified: share of reconstructions closer to their own image than to any other image of their "
        "class. control: SSIM of a decoder trained on shuffled pairs, or of another update. average: SSIM of the "
        f"class's mean outside image. {LIMITS}",
        soft_wrap=True,
    )
    out.print(f"Uploads of {run.method.name} that were not attacked: {', '.join(left)}.", soft_wrap=True)
    for file in pictures:
        if file:
            out.print(file, soft_wrap=True)


def _table(findings: Sequence[Any]) -> Table:
    """Return a table of the findings, one row per upload and attack, that fits into 80 columns."""
    guessed = ["right"] if _guesses(findings) else []
    table = Table(*COLUMNS, *guessed, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, finding in enumerate(findings):
        reached = finding.reached
        if reached is None:
            figures = [*("-" for _ in COLUMNS[3:]), f"{finding.guessed:.2f}"]
        else:
            figures = [
                f"{reached.ssim:.2f}",
                f"{reached.psnr:.1f}",
                f"{reached.mae:.3f}",
                "-" if reached.identified is None else f"{reached.identified:.2f}",
                *(f"{other.ssim:.2f}" for other in (finding.control, finding.average) if other),
            ]
        table.add_row(str(number), finding.upload, str(finding.count), *figures)
    return table


def _guesses(findings: Sequence[Any]) -> bool:
    """Return whether an attack guesses something about a client instead of reconstructing images."""
    return any(finding.reached is None for finding in findings)


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
