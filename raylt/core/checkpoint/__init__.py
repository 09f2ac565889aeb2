"""Checkpoints: folders of safetensors files and a manifest with their hashes."""
