"""CReFF, and CLIP2FL, which builds on CReFF's federated features."""
