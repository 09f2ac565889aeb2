"""The entry point of `raylt` and of `python -m raylt`."""

import sys

from raylt.signals import STOPPED, ignore_signals, stop_on_signals


def main() -> None:
    """Run the command line in a process of its own."""
    stop_on_signals()
    try:
        from raylt.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:  # while it was imported
        sys.exit(STOPPED)
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
