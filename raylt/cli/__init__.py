"""The command line. A system on which raylt cannot run is refused here, before any command is imported."""

import sys

from raylt.errors import RayltError

try:
    import raylt.store  # noqa: F401
except RayltError as error:
    sys.stderr.write(f"error [{error.code}]: {error}\n")
    raise SystemExit(2) from None
