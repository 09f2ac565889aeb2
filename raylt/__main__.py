"""`python -m raylt`."""

from raylt.cli.main import main

main()
