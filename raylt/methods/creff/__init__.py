"""CReFF, and CLIP2FL, which builds on its federated features."""
