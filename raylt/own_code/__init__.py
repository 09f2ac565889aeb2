"""The user's own code: plugin files, and the transfer of their source to other processes."""
