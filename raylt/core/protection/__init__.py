"""Secure sums and differential privacy: what the server may see of a reply."""
