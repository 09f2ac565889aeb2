"""The files of a run folder: reading, writing, and what binds them together."""
