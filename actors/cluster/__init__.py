"""Ray clusters: which cluster a run joins, how it authenticates, and how leftovers are removed."""
