"""Studies: arms over cells and paired seeds, their runs, comparisons, claims and reports."""
