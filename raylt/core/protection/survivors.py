"""The number of members of a secure sum that must survive; unlike `masking`, this needs no cryptography library."""

import math


def fewest_survivors(members: int) -> int:
    """Return the number of members that must survive: two thirds, at least two."""
    return max(2, math.ceil(2 * members / 3))
