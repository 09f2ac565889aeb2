"""Run the script of docs/slurm.md with stand-ins for Slurm's programs and two Ray nodes on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from started import BIN, bare, save_token

PAGE = Path(__file__).parents[2] / "docs/slurm.md"
# this srun runs the command here; a second node on the same machine needs other ports
SRUN = f"""#!{sys.executable}
import os, socket, sys
arguments = sys.argv[1:]
while arguments[0].startswith("-"):
    print(arguments.pop(0), file=open({{log!r}}, "a"))
if arguments[:2] == ["ray", "start"]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments += ["--object-store-memory=100000000", "--metrics-export-port=0"]
    arguments += [f"--dashboard-agent-listen-port={{{{port}}}}"]
os.execvp(arguments[0], arguments)
"""


def script():
    (text,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    return text


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o700)


def test_the_script_is_a_shells(tmp_path):
    program(tmp_path, "job.sh", script())
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)


def test_a_head_that_cannot_start_ends_the_job(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs, "srun", '#!/bin/sh\ncase "$*" in *hostname*) echo 127.0.0.1;; *start*) exit 1;; esac\n')
    program(programs, "scontrol", "#!/bin/sh\necho node1\n")
    program(programs, "ray", "#!/bin/sh\nexit 1\n")
    program(tmp_path, "job.sh", script())
    environment = bare(tmp_path, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node1", SLURM_CPUS_PER_TASK="1")
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    ended = subprocess.run(["bash", tmp_path / "job.sh", "run"], env=environment, capture_output=True, timeout=30)
    assert ended.returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_two_nodes_runs_and_leaves_nothing(tmp_path):
    from ray._private.services import get_node_ip_address

    programs, log = tmp_path / "bin", tmp_path / "srun.txt"
    programs.mkdir()
    program(programs, "srun", SRUN.format(log=str(log)))
    program(programs, "scontrol", "#!/bin/sh\necho node1\necho node2\n")
    program(programs, "hostname", f"#!/bin/sh\necho {get_node_ip_address()}\n")
    program(tmp_path, "job.sh", script())
    save_token(tmp_path / "home")
    job = str(os.getpid())
    environment = bare(
        tmp_path / "home",
        SLURM_JOB_ID=job,
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_CPUS_PER_TASK="2",
        OMP_NUM_THREADS="1",
    )
    environment["PATH"] = f"{programs}:{BIN}:{environment['PATH']}"
    run = ["run", "method=fedavg", "model=small", "data.clients=3", "federation.rounds=1", "local.epochs=1"]
    done = subprocess.run(
        ["bash", tmp_path / "job.sh", *run, "resources.device=cpu", "--format", "json", "--name", "job"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["rounds"] == 1
    assert "2: 4 CPUs" in done.stderr
    assert {"--nodelist=node1", "--nodelist=node2"} <= set(log.read_text().splitlines())
    left = [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if f"raylt-{job}/" in _text(entry)]
    assert left == []


def _text(file):
    try:
        return file.read_text()
    except OSError:
        return ""
