"""Callbacks: observers of a run."""
