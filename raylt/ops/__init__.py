"""Pure tensor functions that two or more methods use."""
