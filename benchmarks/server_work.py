"""Measures the server's own work in the methods of a study, in multiples of the local training of a FedAvg run.

    python benchmarks/server_work.py [--record] [--page]

The study is studies/ground_tuned.yaml, whose searches count client-steps. A budget with `count: passes` would add this
work to a trial's cost, see `raylt.contract.costs.server_steps`. It takes ten minutes on one core. `--record` keeps the
figures in benchmarks/results/server_work.json, and `--page` writes them into docs/results/ground.md.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import recorded
import torch

from raylt.contract.costs import server_steps
from raylt.studies.definition import read_definition
from raylt.studies.records.recorded_runs import read_results

NAME = "server_work"
STUDIES = Path(__file__).parent.parent / "studies"
PAGE = STUDIES.parent / "docs" / "results" / "ground.md"
STUDY = "ground_tuned"
SHAPE = (28, 28, 1)
CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    if arguments.page:
        recorded.write(NAME, table(recorded.kept(NAME)), PAGE)
        return
    torch.set_num_threads(1)
    runs = measure()
    print(json.dumps(runs, indent=1))
    if arguments.record:
        recorded.keep(NAME, {"runs": runs, "recorded": f"{date.today()}"})


def measure() -> dict[str, float]:
    """Return the server's work in a run of each arm, in FedAvg runs, without arms whose server does none."""
    definition = read_definition(STUDIES / f"{STUDY}.yaml")
    tuned = read_results(STUDIES / "results" / f"{STUDY}.json")[3]
    assert definition.tune is not None
    steps = tuned[""]["fedavg"]["budget"] / definition.tune.runs
    bases = {arm: base for (_, arm), base in definition.bases().items()}
    work = {arm: server_steps(base, SHAPE, CLASSES) / steps for arm, base in bases.items()}
    return {arm: round(runs, 4) for arm, runs in work.items() if runs}


def table(kept: dict[str, Any]) -> str:
    """Return the figures as a table, largest first."""
    rows = [
        [arm, f"{work:.2f}" if work >= 0.005 else "< 0.01"]
        for arm, work in sorted(kept["runs"].items(), key=lambda each: -each[1])
    ]
    return recorded.table_of(["arm", "server's work, FedAvg runs"], rows)


if __name__ == "__main__":
    main()
