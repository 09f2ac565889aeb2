"""The command line, which rejects unsupported operating systems before it imports any command."""

import sys

from raylt.errors import RayltError

try:
    import raylt.store  # noqa: F401
except RayltError as error:
    sys.stderr.write(f"error [{error.code}]: {error}\n")
    raise SystemExit(2) from None
