"""Runs and run folders: starting, resuming, reading and replaying them."""
