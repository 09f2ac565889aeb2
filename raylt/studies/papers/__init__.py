"""The papers' printed tables, and verdicts on whether recorded runs reproduce them."""
