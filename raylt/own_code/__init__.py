"""The user's own code: plugin files, and how their source reaches other processes."""
