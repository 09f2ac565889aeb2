"""Run folders: making, resuming, reading and replaying them."""
