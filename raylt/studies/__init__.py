"""Studies: compare arms (methods or settings) over cells (data settings) and paired seeds.

A study holds its runs, comparisons, claims and reports.
"""
