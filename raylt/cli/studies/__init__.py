"""Commands for studies, comparisons, plots and pages of results."""
