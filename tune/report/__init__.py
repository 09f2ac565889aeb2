"""Results of a search: files, plots, Pareto fronts, importances, and its display at the terminal."""
