"""The command `raylt attack`."""

import json
from pathlib import Path

import pytest
from commands import refused


@pytest.mark.slow
def test_an_attack_is_reported_in_figures_and_a_picture(raylt, finished):
    pytest.importorskip("torchmetrics")
    folder, _ = finished
    code, out, err = raylt("attack", folder, "--upload", "features", "--epochs", 1, "--picture", ".")
    assert (code, err) == (0, "")
    assert "features of single images, by a decoder" in out
    assert "A low figure is not a proof" in out
    assert "Uploads of fedprox that were not attacked: update, models of rounds of more than one step" in out
    assert Path("attack_features_0.png").stat().st_size > 1000
    code, out, _ = raylt("attack", folder, "--upload", "features", "--epochs", 1, "--picture", ".", "--format", "json")
    assert json.loads(out)["not_attacked"][-1] == "judgements"
    finding = json.loads(out)["findings"][0]
    assert set(finding["reached"]) == {"ssim", "psnr", "mae", "identified"}
    assert finding["average"]["identified"] < 0.3
    refused(raylt("attack", folder, "--upload", "means"), "--upload", "means", "features, update")
