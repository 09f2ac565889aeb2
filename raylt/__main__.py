"""The entry point of `raylt` and of `python -m raylt`."""

from raylt.signals import STOPPED, exit_with, stop_on_signals


def main() -> None:
    """Run the command line in a process of its own."""
    stop_on_signals()
    code = 0
    try:
        from raylt.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:  # Ctrl-C during the import
        code = STOPPED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    exit_with(code)


if __name__ == "__main__":
    main()
