"""Pure tensor functions used by two or more methods."""
