"""Robust rules for means and sums, and the rejection of replies that are far longer than the others."""
