"""Finding, decoding and caching of image files."""
