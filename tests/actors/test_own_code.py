"""The user's own code on Ray: the methods of docs/write-a-method.md, values of a script, odd file names. Minutes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from started import bare
from test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "write-a-method.md"
SMALL = ["data.source=digits", "data.clients=2", "federation.rounds=1", "local.epochs=1"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWN = """
from typing import ClassVar
import raylt, torch
from raylt import Uniform
from torch.nn import functional as F
{extra}

class Own(raylt.Method):
    name: ClassVar[str] = "own"
    paper: ClassVar[str] = "for tests"
    pull: float = raylt.hp(0.1, Uniform(0, 1), "for tests")

    def objective(self, client, message):
        model, cudnn = client.model, torch.backends.cudnn
        return lambda batch: F.cross_entropy(model(batch.x), batch.y, weight=torch.ones(model.classes)) + {term}
"""
# stands in for a package of raylt, and ends the process if it is imported
IN_PLACE = "raise SystemExit('the user\\'s file was run')\n"


def started(*command, folder, **variables):
    """Run a command of a user whose workers have only raylt and the current folder on their path."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=560,
        env=bare(folder, RAY_AUTH_MODE="disabled", **variables),
        check=False,
    )


def test_methods_of_the_page_run_on_ray_to_the_same_bits(tmp_path):
    # the page's blocks after this heading use the file that the blocks before it make
    end = PAGE.read_text().splitlines().index("## Bring it in")
    (tmp_path / "my-method.py").write_text("\n".join([*blocks(PAGE).split("\n")[:end], ""]))
    (tmp_path / "work").mkdir()
    # one whose clients keep a state, and one with another step after the rounds
    names = ["mine_memory", "mine_nearest"]
    script = f"""
import ray, raylt
from pathlib import Path
from raylt.registry import load_plugin
load_plugin(Path("../my-method.py"))
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
for name in {names}:
    shas = [raylt.run(name, overrides={SMALL}, out=fleet, name=name, fleet=fleet, quiet=True).summary["model_sha256"]
            for fleet in ("ray", "local")]
    print(name, shas[0] == shas[1])
"""
    (tmp_path / "work" / "script.py").write_text(script)
    done = started(sys.executable, "script.py", folder=tmp_path / "work")
    outcomes = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert outcomes == dict.fromkeys(names, "True"), done.stderr
    assert done.returncode == 0, done.stderr


def test_a_script_with_files_named_as_packages_runs_its_own_values_on_ray(tmp_path):
    for name in ("actors", "tune", "data"):
        (tmp_path / f"{name}.py").write_text(IN_PLACE)
    text = (
        OWN.format(extra="", term="0")
        + f"""
import threading
LOCK = threading.Lock()

class Locked(Own):
    name: ClassVar[str] = "locked"
    def train(self, client, message):
        with LOCK:
            return super().train(client, message)

print(raylt.run(Own(), overrides={SMALL}, name="one", quiet=True).state)
try:
    raylt.run(Locked(), overrides={SMALL}, name="two", quiet=True)
except raylt.RayltError as error:
    print(error.exit_code, error)
"""
    )
    (tmp_path / "script.py").write_text(text)
    done = started(sys.executable, "script.py", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "done", done.stdout + done.stderr
    assert lines[1].startswith("2 script.py:"), lines
    assert "Locked.train uses LOCK, a lock, which cannot be sent to another process" in lines[1]


def test_a_search_with_a_plugin_named_torch_prints_a_command_that_runs_unchanged(tmp_path):
    (tmp_path / "torch.py").write_text(OWN.format(extra="import helper", term="self.pull * helper.ONE"))
    (tmp_path / "helper.py").write_text("ONE = 1\n")
    for name in ("actors", "tune"):
        (tmp_path / f"{name}.py").write_text(IN_PLACE)
    raylt = [sys.executable, "-P", "-c", "from raylt.cli.main import main; main()"]
    found = started(
        *raylt,
        "tune",
        "--plugin",
        "torch.py",
        "method=own",
        *SMALL,
        "resources.actors=1",
        "--samples",
        "1",
        "--scheduler",
        "none",
        "--name",
        "search",
        folder=tmp_path,
        COLUMNS="200",
    )
    assert found.returncode == 0, found.stdout + found.stderr
    command = shlex.split(found.stdout.splitlines()[-1].partition("; ")[2])
    assert command[0] == "raylt"
    done = started(*raylt, *command[1:], "--format", "json", "--name", "best", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trials = json.loads((tmp_path / "runs/search/trials.json").read_text())
    assert [trial["state"] for trial in trials] == ["done"]
    head = (tmp_path / "runs/search/best.yaml").read_text()
    assert json.loads(done.stdout)["model_sha256"][:16] in head
