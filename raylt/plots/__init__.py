"""Plots of runs, studies and data splits."""
