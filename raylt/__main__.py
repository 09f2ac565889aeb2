"""The entry point of `python -m raylt`."""

from raylt.cli.main import main

main()
