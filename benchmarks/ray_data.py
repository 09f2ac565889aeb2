"""Memory and time of a data set that Ray Data reads (`data.source=ray:PATH`), by process.

    python benchmarks/ray_data.py [--rows 200000] [--clients 200] [--side 8] [--record]

It writes Parquet files of PNG images with a class and a client each, then opens them in a process of its own: once from
the files, and once from the cache. Memory is private (USS), every 50 ms, at its peak: of the process that opens the
data set (the driver of a run), of the process that reads (it has Ray's client), and of the tasks that decode together.
`--record` keeps the figures in benchmarks/results/ray_data.json.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import recorded
from PIL import Image

from raylt.config import DataConfig
from raylt.data.task import build_task

NAME = "ray_data"
ROWS_OF_A_FILE = 50_000
CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--open", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(open_rows(Path(arguments.open), arguments.side)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write(folder / "rows", arguments.rows, arguments.clients, arguments.side)
        figures: dict[str, Any] = {
            "rows": arguments.rows,
            "clients": arguments.clients,
            "side": arguments.side,
            "parquet_mb": round(written / 1e6),
            "pixels_mb": round(arguments.rows * arguments.side**2 * 3 / 1e6),
            "from_files": measure(folder, arguments.side),
            "from_cache": measure(folder, arguments.side),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "recorded": f"{date.today()}",
        }
    print(json.dumps(figures, indent=1))
    if arguments.record:
        earlier = recorded.kept(NAME) if (recorded.HERE / "results" / f"{NAME}.json").exists() else {}
        recorded.keep(NAME, earlier | {f"{arguments.rows}": figures})


def write(folder: Path, rows: int, clients: int, side: int) -> int:
    """Write the rows, client by client, and return their bytes."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, ROWS_OF_A_FILE)):
        places = np.arange(start, min(start + ROWS_OF_A_FILE, rows))
        images = generator.integers(0, 256, (len(places), side, side, 3), dtype=np.uint8)
        table = pa.table(
            {
                "image": [_png(image) for image in images],
                "label": generator.integers(0, CLASSES, len(places)),
                "client": [f"client {client:05}" for client in places * clients // rows],
            }
        )
        pq.write_table(table, folder / f"{number:05}.parquet", row_group_size=10_000)
    return sum(file.stat().st_size for file in folder.iterdir())


def open_rows(folder: Path, side: int) -> dict[str, Any]:
    """Open the rows as a run does, and return how long it took."""
    before = psutil.Process().memory_full_info().uss
    began = time.perf_counter()
    source = f"ray:{folder / 'rows'}"
    task = build_task(DataConfig(source=source, root=str(folder / "root"), size=side, client_column="client"))
    return {"seconds": round(time.perf_counter() - began, 1), "clients": task.clients, "before": before}


def measure(folder: Path, side: int) -> dict[str, Any]:
    """Open the rows in a process of its own and return its time, and the peaks of all processes in MB."""
    command = [sys.executable, __file__, "--open", str(folder), "--side", str(side)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAYLT_ADDRESS": "local"})
    peaks = {"driver": 0, "reader": 0, "tasks": 0}
    while process.poll() is None:
        now = dict.fromkeys(peaks, 0)
        for role, size in _sizes(process.pid):
            now[role] += size
        peaks = {role: max(peaks[role], now[role]) for role in peaks}
        time.sleep(0.05)
    assert process.stdout is not None
    answer = json.loads(process.stdout.read())
    before = answer.pop("before")
    grown = {"driver_grew_mb": round((peaks["driver"] - before) / 1e6)}
    return answer | {f"{role}_mb": round(size / 1e6) for role, size in peaks.items()} | grown


def _sizes(driver: int) -> Iterator[tuple[str, int]]:
    """Yield the role and private bytes of each process that takes part."""
    for process in [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            role = "driver" if process.pid == driver else "reader" if "data_reader" in title else "tasks"
            if role != "tasks" or title.startswith("ray::"):
                yield role, process.memory_full_info().uss
        except psutil.Error:  # it has ended
            continue


def _png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=1)
    return content.getvalue()


if __name__ == "__main__":
    main()
