"""CReFF, and CLIP2FL, which uses CReFF's federated features."""
