"""Attacks on the uploads of methods, and figures of how close their reconstructions are."""
