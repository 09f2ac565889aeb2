"""Sums that nobody sees the terms of: secret shares and pairwise masks. Knows no client and no model."""
