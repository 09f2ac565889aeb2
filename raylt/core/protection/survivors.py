"""The number of members that must survive a secure sum.

Unlike `masking`, this module needs no cryptography library.
"""

import math


def fewest_survivors(members: int) -> int:
    """Return the number of members that must survive a secure sum: two thirds, and at least two."""
    return max(2, math.ceil(2 * members / 3))
