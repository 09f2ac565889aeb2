"""Image files: finding, decoding and caching them."""
