"""docs/monitors.md lists the figures that runs report."""

import re
from pathlib import Path

import pytest
import teachers
from rounds import run

from raylt.methods.bpfed.method import BPFed
from raylt.methods.fedprox import FedProx
from raylt.methods.fedsm.method import FedSM
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.sfd.method import SFD

PAGE = (Path(__file__).parents[2] / "docs" / "monitors.md").read_text()
PLAIN = {"loss", "teacher", "synthetic", "clusters", "clustered"}  # figures that need no explanation or name things


def documented(name: str) -> set[str]:
    """Return the figures in the page's rows for a method and for all methods."""
    rows = [row.split("|")[1:3] for row in PAGE.splitlines() if row.startswith("| ")]
    return {
        figure
        for who, what in rows
        if f"`{name}`" in who or "all that re-train" in who
        for figure in re.findall(r"`(\w+)`", what)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        SFD(rf_dim=60, m_min=80, m_max=120, synthesis_steps=2, retrain_epochs=2),
        FedProx(),
        BPFed(),
        *(
            FedSM(retrain_rounds=1, size=5, retrain_epochs=2, finetune=tuned, teacher="npz:-")
            for tuned in (False, True)
        ),
        MuPFL(m=5, tau=2, matching_steps=3),
    ],
    ids=lambda method: method.name,
)
def test_every_figure_that_a_method_reports_is_explained(tiny_task, tmp_path, method):
    if isinstance(method, FedSM):
        path = teachers.save_features(tmp_path / "f.npz", tiny_task)
        method = FedSM(**method.model_dump() | {"teacher": path})
    figures = run(tiny_task, tmp_path, method, 2).server.figures
    assert set(figures) - PLAIN <= documented(method.name)
    assert {"shares"} <= documented("fedprox") & documented("sfd")
