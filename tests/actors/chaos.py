"""Start runs, resume the killed ones with `raylt resume` until all end, and find the processes of their cluster."""

import subprocess
import sys

import psutil

AT_ONCE = 2
# every call is retried however often its process dies, so that no client is left out
SETTINGS = [
    "federation.rounds=8",
    "local.epochs=1",
    "data.clients=4",
    "federation.participation=0.75",
    "federation.retries=50",
    "resources.actors=2",
    "resources.cpus_per_client=0.5",
]


class Runs:
    """One command line per run; a killed run is continued with `raylt resume`."""

    def __init__(self, folder, address, methods):
        self.folder, self.address, self.methods = folder, address, methods
        self.begun, self.done, self.drivers = 0, [], {}

    def look(self, more):
        """Note the runs that ended, start new ones while `more` is true, and resume those that were killed."""
        for name, process in list(self.drivers.items()):
            code = process.poll()
            if code == 0:
                self.done.append(name)
                del self.drivers[name]
            elif code is not None:
                # killed itself, or its server died three times in one step, or a client actor died while it started
                assert code == -9 or (code == 1 and " died" in self.output(name).splitlines()[-1]), self.output(name)
                begun = (self.folder / name / "config.yaml").is_file()
                self.drivers[name] = self.start(name, "resume", self.folder / name) if begun else self.run(name)
        while more and len(self.drivers) < AT_ONCE:
            name = f"{self.methods[self.begun % len(self.methods)]}-{self.begun}"
            self.begun += 1
            self.drivers[name] = self.run(name)

    def run(self, name):
        return self.start(
            name, "run", f"method={name.partition('-')[0]}", *SETTINGS, "--out", self.folder, "--name", name
        )

    def start(self, name, *arguments):
        with (self.folder / f"{name}.txt").open("a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "raylt", *map(str, arguments), "--address", self.address, "--format", "json"],
                stdout=out,
                stderr=out,
            )

    def output(self, name):
        return (self.folder / f"{name}.txt").read_text()

    def steps(self):
        """Count the committed steps of all runs; a resumed run may take a line back."""
        return sum(file.read_bytes().count(b"\n") for file in self.folder.glob("*/metrics.jsonl"))

    def under_way(self):
        """Return the names of the runs that have taken a step, so that a kill loses something."""
        return [name for name in self.drivers if (self.folder / name / "metrics.jsonl").exists()]


def workers(kind, cluster):
    """Return this cluster's processes that run an actor of the given class."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if f"ray::{kind}" in " ".join(process.info["cmdline"] or []):
            try:
                parents = {parent.pid for parent in process.parents()}
            except psutil.NoSuchProcess:
                continue
            if parents & raylets:
                found.append(process)
    return found
