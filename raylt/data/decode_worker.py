"""A process that decodes: `python -m raylt.data.decode_worker HANDLE`, started by raylt/data/processes.py.

Calls come as pickles over the socket that it inherits, results go back. When the other end is closed, as it is when
the process that started it dies in whatever way, it ends at once, in the middle of an image.
"""

import os
import pickle
import queue
import sys
import threading
import warnings
from multiprocessing.connection import Connection

from raylt.errors import one_line


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, letters), daemon=True).start()
    warnings.simplefilter("ignore")                 # what cannot be decoded is told all at once, where this was started
    while True:
        try:
            function, *arguments = pickle.loads(letters.get())
            result, problem = function(*arguments), None
        except Exception as error:
            result, problem = None, one_line(error)
        try:
            channel.send((result, problem))
        except OSError:                             # nobody is there any more
            os._exit(0)


def _listen(channel: Connection, letters: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            letters.put(channel.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
