"""Attacks on what clients upload, and measures of how close reconstructions are to the private images."""
