"""Data sets, their long-tailed subsets, and who gets what. Numpy only: no module here needs torch to be imported."""
