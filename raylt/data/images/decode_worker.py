"""Main program of a decoding process, which raylt/data/images/workers.py starts.

The command is `python -m raylt.data.images.decode_worker HANDLE`.

It receives calls as pickles over an inherited socket, and sends the results back. When the other end is closed, for
example because the parent process died, the process ends at once, even in the middle of an image.
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
    """Receive and run function calls until the other end of the pipe is closed."""
    channel = Connection(int(sys.argv[1]))
    letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, letters), daemon=True).start()
    warnings.simplefilter("ignore")  # the parent process reports all damaged images together
    while True:
        try:
            function, *arguments = pickle.loads(letters.get())
            result, problem = function(*arguments), None
        except Exception as error:
            result, problem = None, one_line(error)
        try:
            channel.send((result, problem))
        except OSError:  # the other end is closed
            os._exit(0)


def _receive(channel: Connection, letters: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            letters.put(channel.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
