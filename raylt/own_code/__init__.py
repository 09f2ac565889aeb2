"""The user's own code: plugin files, and the way that their source reaches other processes."""
