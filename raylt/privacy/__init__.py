"""Attacks on methods' uploads, and measures of how close their reconstructions are."""
