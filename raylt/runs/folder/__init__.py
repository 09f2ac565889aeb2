"""The files of a run folder: reading, writing, and the hashes that bind them together."""
