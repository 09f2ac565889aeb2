"""Runs a check case in another process, which receives the method with its source code as a Ray worker does."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import torch

from raylt.contract.case import Case
from raylt.contract.declarations import Violation
from raylt.errors import RayltError, user_fault
from raylt.own_code.shipment import ship
from raylt.own_code.top_level_names import HOME

TIMEOUT_S = 600


def bits_elsewhere(case: Case) -> dict[str, str]:
    """Send the method to another process, run it there, and return the hashes of the results.

    A method of raylt is importable in every process, so it is only pickled and run in this process.

    Raises:
        Violation: The method cannot be sent, cannot be imported in the other process, or fails there.
    """
    names = dict.fromkeys(kind.__module__ for kind in type(case.method).__mro__)
    modules = [sys.modules[name] for name in names if name in sys.modules]
    try:
        shipped = ship(case.method, modules, cloudpickle.dumps)
    except RayltError as error:
        raise Violation(str(error)) from error
    if type(case.method).__module__.startswith("raylt."):
        return case.run(method=shipped.open()).bits
    job = pickle.dumps((shipped, case.kind, str(case.folder), torch.get_num_threads()))
    path = os.pathsep.join(part for part in (str(HOME), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "raylt.contract.arrival"],
        input=job,
        capture_output=True,
        cwd=case.folder,
        env=os.environ | {"PYTHONPATH": path},
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines() or ["no message on standard error"]
        raise Violation(f"the other process ended with {done.returncode}: {last[-1]}")
    answer = json.loads(done.stdout)
    if "fault" in answer:
        raise Violation(f"in another process: {answer['fault']}")
    return answer["bits"]


def main() -> None:
    """Run the case on standard input; print its hashes, or its fault, as JSON."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the user's code must not mix with the answer
    shipped, kind, folder, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    try:
        answer = {"bits": Case(shipped.open(), kind, Path(folder)).run().bits}
    except Exception as error:  # any exception of the method's code
        answer = {"fault": str(error) if isinstance(error, RayltError) else user_fault(error)}
    channel.write(json.dumps(answer))
    channel.close()


if __name__ == "__main__":
    main()
