"""The papers' printed tables, and verdicts of recorded runs on them."""
