"""CReFF, and what builds on its federated features."""
