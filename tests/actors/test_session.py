"""The local cluster when the temporary folder's path is long or the dashboard does not start."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from actors.cluster import session
from raylt.errors import RayltError

LONG = "scratch_of_the_cluster/" + "x" * 40 + "/slurm_jobdir/job_1355700/tmp.t0016"
SCRIPT = """
import tempfile
from actors.cluster.session import dashboard, session
{before}
with session(None) as cluster:
    import ray

    print("driver", tempfile.gettempdir())
    print("worker", ray.get(ray.remote(tempfile.gettempdir).options(num_cpus=0).remote()))
    print("dashboard", dashboard())
    print("remarks", cluster.remarks)
"""
NO_DASHBOARD = """
import sys
from ray._private import services

start = services.start_ray_process
def refuse(command, kind, *others, **options):
    if kind == services.ray_constants.PROCESS_TYPE_DASHBOARD:
        command = [sys.executable, "-c", "raise SystemExit('no port is free')"]
    return start(command, kind, *others, **options)
services.start_ray_process = refuse
"""


@pytest.mark.parametrize(("base", "own"), [("/tmp", False), ("/scratch/" + "x" * 80, True), ("/é", True)])
def test_rays_processes_get_a_temporary_folder_that_they_can_use(monkeypatch, base, own):
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: base)
    assert session._temporary(Path("/tmp/raylt-1")) == ({"TMPDIR": "/tmp/raylt-1"} if own else {})


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (None, False),
        (KeyboardInterrupt(), False),
        (OSError("full"), False),
        (RayltError("diverged", code="training.diverged"), False),
        (RayltError("see Ray's logs", code="client.not-started"), True),
    ],
)
def test_the_session_folder_stays_only_for_an_error_that_refers_to_its_logs(monkeypatch, tmp_path, error, kept):
    monkeypatch.setattr(session.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(session, "_fits", lambda base: True)
    with suppress(KeyboardInterrupt, OSError, RayltError), session._folder() as folder:
        assert folder.parent == tmp_path
        if error is not None:
            raise error
    assert folder.exists() == kept


def started(tmp_path, before="", **variables):
    """Run the script; return the lines that it printed, by their first word."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **variables,
    }
    script = SCRIPT.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_temporary_folder_ends_no_run(tmp_path):
    long = tmp_path / LONG
    long.mkdir(parents=True)
    lines = started(tmp_path, TMPDIR=str(long))
    assert lines["driver"] == str(long)
    assert len(lines["worker"]) < session.MAX_FOLDER_LENGTH
    assert lines["dashboard"].startswith("http://127.0.0.1:")
    assert lines["remarks"] == "()"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dashboard_that_does_not_start_is_a_notice(tmp_path):
    lines = started(tmp_path, NO_DASHBOARD)
    assert lines["dashboard"] == "None"
    assert lines["remarks"] == repr((session.NO_DASHBOARD,))


def test_reports_of_ray_about_lost_processes_stay_off_standard_output(capsys):
    import ray._private.worker as worker

    report = {"lines": ["Raylet is terminated. Last 20 lines of the Raylet logs: [state-dump]"], "pid": "raylet"}
    before = worker.print_to_stdstream
    with session._without_reports(ray):
        worker.print_to_stdstream(report | {"is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    assert worker.print_to_stdstream is before
