"""Ray clusters: which one a run joins, how it gets in, and what is left of it."""
