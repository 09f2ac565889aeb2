"""A method whose client 0 once, after round 1, takes up to GREED bytes of memory and waits to be killed for them."""

import os
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method

STEP = 128 * 2**20  # bytes


class Greedy(Method):
    """FedAvg with one greedy client; the file `folder`/greedy marks that the allocation has happened."""

    name: ClassVar[str] = "greedy"
    paper: ClassVar[str] = "for tests"
    folder: str = ""

    def train(self, client: Client, message: Message) -> Reply:
        mark = Path(self.folder, "greedy")
        if self.folder and client.id == 0 and client.round >= 2 and not mark.exists():
            mark.write_text(str(os.getpid()))
            taken = [np.ones(STEP, dtype=np.uint8)]
            while len(taken) * STEP < int(os.environ["GREED"]):
                taken.append(np.ones(STEP, dtype=np.uint8))
                time.sleep(0.02)  # so that little is taken between the limit and the kill
            time.sleep(60)
        return super().train(client, message)
