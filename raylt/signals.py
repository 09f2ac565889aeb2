"""What a signal does to a command."""

import signal
import threading


def interrupt_on_sigterm() -> None:
    """SIGTERM ends a command as Ctrl-C does; by itself it, or Ray's handler, would end the process without a word."""
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
