"""Reconstructs images from raw features, class means and synthetic features, as in Fig. 6 of SFD.

    python benchmarks/inversion.py --source npz:cifar10_lt.npz --outside npz:tiny_imagenet32.npz [--method sfd]
        [--model unpooled] [--rounds 10] [--imbalance 100] [--clients 20] [--epochs 15]
        [--setting method.rf_dim=1000 ...]

Trains one run and attacks all of its uploads as `raylt attack` does. The model `unpooled` is of this script: two
convolutions that halve the image each, and no pooling, so that features keep where things are. `--record` adds the
figures, under the run's method and model, to benchmarks/results/inversion.json and writes the table of docs/privacy.md
from it, with the pictures beside it; `--page` writes the table alone.
"""

import argparse
import tempfile
import time
from collections import OrderedDict
from datetime import date
from typing import Any

import recorded
from torch import nn

import raylt
from raylt.models.split import SplitModel
from raylt.privacy.attack import attack
from raylt.privacy.picture import draw
from raylt.privacy.reconstruction import AttackFinding, check_measures

NAME = "inversion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="digits")
    parser.add_argument("--outside")
    parser.add_argument("--method", default="sfd")
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--imbalance", type=float, default=100.0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--setting", action="append", default=[])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if not arguments.page:
        name, figures, findings = measured(arguments)
        print(table({name: figures}))
        if not arguments.record:
            return
        everything = recorded.kept(NAME) if (recorded.HERE / "results" / f"{NAME}.json").exists() else {}
        recorded.keep(NAME, everything | {name: figures})
        for number, finding in enumerate(findings):
            if finding.shown is not None:
                file = f"privacy_{arguments.method}_{arguments.model}_{number}_{finding.upload}.png"
                draw(finding, recorded.PAGE.parent / file)
    recorded.write(NAME, table(recorded.kept(NAME)))


def measured(arguments: argparse.Namespace) -> tuple[str, dict[str, Any], list[AttackFinding]]:
    """Train a run and attack it; return the name of the run, its figures and the findings."""
    check_measures()
    raylt.register(unpooled, kind="model")
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = raylt.load_config(
            None,
            [
                f"method={arguments.method}",
                f"model={arguments.model}",
                f"data.source={arguments.source}",
                f"data.imbalance={arguments.imbalance:g}",
                f"data.clients={arguments.clients}",
                "data.alpha=0.5",
                f"federation.rounds={arguments.rounds}",
                "local.batch=32",
                f"evaluation.every={arguments.rounds}",
                *arguments.setting,
            ],
        )
        run = raylt.run(config, out=folder, name="run", fleet="local", quiet=True)
        findings = attack(run, outside=arguments.outside, epochs=arguments.epochs)
        accuracy = run.summary["accuracy"]["last"]
    return (
        f"{arguments.method}, {arguments.model}",
        {
            "recorded": date.today().isoformat(),
            "accuracy": accuracy,
            "cpu_seconds": round(time.process_time() - start),
            "rounds": arguments.rounds,
            "decoder_epochs": arguments.epochs,
            "findings": [plain(finding) for finding in findings],
        },
        findings,
    )


def unpooled(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Build an encoder without pooling: 8 maps of a quarter of the image side, d = 512 for 32x32 images."""
    height, width, channels = shape

    def stage(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )

    encoder = nn.Sequential(OrderedDict(stage1=stage(channels, 16), stage2=stage(16, 8), pool=nn.Flatten()))
    return SplitModel(encoder, 8 * -(-height // 4) * -(-width // 4), classes)


def plain(finding: AttackFinding) -> dict[str, Any]:
    return {"upload": finding.upload, "what": finding.what, "count": finding.count, "guessed": finding.guessed} | {
        name: value and value._asdict()
        for name, value in (("reached", finding.reached), ("control", finding.control), ("average", finding.average))
    }


def table(runs: dict[str, Any]) -> str:
    """Return the table of attacks in docs/privacy.md."""
    rows = []
    for name, run in runs.items():
        for finding in run["findings"]:
            reached = finding["reached"]
            if reached is None:
                rows.append([name, finding["what"], finding["count"], f"right: {finding['guessed']:.2f}", "", "", ""])
                continue
            rows.append(
                [
                    name,
                    finding["what"],
                    finding["count"],
                    f"{reached['ssim']:.2f} / {reached['psnr']:.1f} / {reached['mae']:.3f}",
                    "-" if reached["identified"] is None else f"{reached['identified']:.2f}",
                    f"{finding['control']['ssim']:.2f}",
                    f"{finding['average']['ssim']:.2f}",
                ]
            )
    return recorded.table_of(["run", "attack", "n", "reached", "identified", "control SSIM", "average SSIM"], rows)


if __name__ == "__main__":
    main()
