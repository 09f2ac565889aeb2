"""The files of a run folder: reading and writing them, and the hashes that link them."""
