"""The command `raylt attack`."""

import io
import json
from pathlib import Path

import pytest
from commands import refused
from rich.console import Console

from raylt.cli.attack import _table
from raylt.errors import ConfigError
from raylt.privacy.reconstruction import AttackFinding, Nearness


@pytest.mark.parametrize("guessed", [0.9, None])
def test_the_table_of_attacks_fits_into_80_columns(guessed):
    reached = Nearness(ssim=0.98, psnr=29.2, mae=0.026, identified=1.0)
    findings = [AttackFinding("activations", "activations after a layer", 200, reached, reached, reached)]
    findings += [AttackFinding("counts", "whether a client holds a class", 200, guessed=guessed)] if guessed else []
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_table(findings))
    lines = console.export_text().splitlines()
    assert len(lines) == 2 + len(findings)
    assert "…" not in "".join(lines)
    assert ("right" in lines[0]) == (guessed is not None)


def test_the_attack_has_every_option(raylt, monkeypatch, tmp_path):
    given = []

    def attack(run, *options):
        given.append(options)
        raise ConfigError("attack: ends here. Repeat it.", code="config.conflict")

    monkeypatch.setattr("raylt.privacy.attack.attack", attack)
    monkeypatch.setattr("raylt.runs.run.Run.open", lambda folder: None)
    assert raylt("attack", tmp_path, "--upload", "update", "--outside", "digits", "--epochs", 3).code == 2
    assert given == [("update", "digits", 3)]


@pytest.mark.slow
def test_an_attack_is_reported_in_figures_and_a_picture(raylt, finished):
    pytest.importorskip("torchmetrics")
    folder, _ = finished
    code, out, err = raylt("attack", folder, "--upload", "features", "--epochs", 1, "--picture", ".")
    assert (code, err) == (0, "")
    assert "0 features: features of single images, by a decoder" in out
    assert "A low figure is not a proof" in out
    assert "Uploads of fedprox that were not attacked: update, models of rounds of more than one step" in out
    assert Path("attack_features_0.png").stat().st_size > 1000
    code, out, _ = raylt("attack", folder, "--upload", "features", "--epochs", 1, "--picture", ".", "--format", "json")
    assert json.loads(out)["not_attacked"][-1] == "judgements"
    finding = json.loads(out)["findings"][0]
    assert set(finding["reached"]) == {"ssim", "psnr", "mae", "identified"}
    assert finding["average"]["identified"] < 0.3
    refused(raylt("attack", folder, "--upload", "means"), "--upload", "means", "features, update")
