"""Facts about this machine that each operating system reports in its own way."""

import os
import sys


def cores() -> list[int]:
    """Return the indices of the CPU cores that this process may use, or of all cores if unknown (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    import resource  # Not available on Windows, which raylt.store rejects with a message on import.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, other systems KiB.


def total_memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
