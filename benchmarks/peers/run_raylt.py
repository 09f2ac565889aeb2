"""Runs raylt as `raylt run` does: run_raylt.py FOLDER ray|local|processes[-stacked].

As in the other systems nothing is saved between rounds; at the end raylt judges its model by a hundred test images,
which the others do not.
"""

import json
import sys
from pathlib import Path

import raylt


class Marks(raylt.Callback):
    """Callback that reports the end of every round."""

    def on_step(self, report) -> None:
        print(f"ROUND {report.step}", flush=True)


def main() -> None:
    folder, system = Path(sys.argv[1]), sys.argv[2]
    fleet, _, stacked = system.partition("-")
    scale = json.loads((folder / "scale.json").read_text())
    raylt.run(
        "fedavg",
        out=folder / "runs",
        name=f"raylt-{system}",
        fleet=fleet,
        quiet=True,
        callbacks=[Marks()],
        overrides={
            "data.source": f"npz:{folder / 'data.npz'}",
            "data.partition": "by_id",
            "data.imbalance": 1,
            "model": scale["model"],
            "federation.rounds": scale["rounds"],
            "federation.participation": scale["per_round"] / scale["clients"],
            "local.epochs": 1,
            "local.batch": scale["batch"],
            "local.lr": scale["lr"],
            "local.momentum": 0.0,
            "local.stacked": "auto" if stacked else "off",
            "resources.actors": 2,
            "resources.device": "cpu",
            "evaluation.every": scale["rounds"],
            "output.checkpoint_every": scale["rounds"],
        },
    )


if __name__ == "__main__":
    main()
