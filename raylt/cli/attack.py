"""`raylt attack`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, RunFolder, out, print_json

LIMITS = ("A low figure is no proof: it says what these attacks reached, with these outside images. docs/privacy.md "
          "says what each attack is.")


def attack(run_folder: RunFolder,
           upload: Annotated[str | None, typer.Option(help="The upload that is attacked: update, means, counts, "
                                                      "gradients, activations, effective or synthetic, as the "
                                                      "method has them; or features, for reference. By default all "
                                                      "of these.")] = None,
           outside: Annotated[str | None, typer.Option(help="A source whose images decoders are trained on; by default "
                                                       "the run's test set.")] = None,
           epochs: Annotated[int, typer.Option(min=1, help="How many times a decoder sees them.")] = 60,
           picture: Annotated[Path | None, typer.Option(help="The folder that pictures go to; by default the run's.")
                              ] = None,
           format: FormatOption = Format.table) -> None:
    """Attack what a finished run uploaded: how near can somebody who sees it come to training images?"""
    from raylt.privacy.attack import attack as attack_run
    from raylt.privacy.picture import draw
    from raylt.privacy.seen import not_attacked, uploads_of
    from raylt.runs.run import Run
    run = Run.open(run_folder)
    findings = attack_run(run, upload, outside, epochs)
    attacked = {finding.upload for finding in findings}
    left = [*(name for name in uploads_of(run.method) if name not in attacked), *not_attacked(run.method.name)]
    pictures = [None if finding.shown is None else
                str(draw(finding, (picture or run_folder) / f"attack_{finding.upload}_{number}.png"))
                for number, finding in enumerate(findings)]
    if format is Format.json:
        print_json({"findings": [_plain(finding, file) for finding, file in zip(findings, pictures, strict=True)],
                    "not_attacked": left, "limits": LIMITS})
        return
    table = Table("upload", "attack", "n", "SSIM", "PSNR", "MAE", "told", "control", "average", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    table.columns[1].overflow = "fold"
    for finding in findings:
        if finding.reached is None:
            table.add_row(finding.upload, finding.what, str(finding.count), f"right: {finding.guessed:.2f} (0.50 by "
                          "chance)")
            continue
        told = "-" if finding.reached.told is None else f"{finding.reached.told:.2f}"
        table.add_row(finding.upload, finding.what, str(finding.count), f"{finding.reached.ssim:.2f}",
                      f"{finding.reached.psnr:.1f}", f"{finding.reached.mae:.3f}", told,
                      *(f"{other.ssim:.2f}" for other in (finding.control, finding.average) if other))
    out.print(table)
    out.print("control and average: the SSIM of a decoder trained on shuffled pairs (of updates: another's update), "
              f"and of the class's mean outside image. {LIMITS}", soft_wrap=True)
    out.print(f"Not attacked of what {run.method.name} uploads: {', '.join(left)}.", soft_wrap=True)
    for file in pictures:
        if file:
            out.print(file, soft_wrap=True)


def _plain(finding: Any, file: str | None) -> dict[str, Any]:
    named = {name: value._asdict() if value is not None else None for name, value in (
        ("reached", finding.reached), ("control", finding.control), ("average", finding.average))}
    return {"upload": finding.upload, "what": finding.what, "count": finding.count, "guessed": finding.guessed,
            "picture": file, **named}
