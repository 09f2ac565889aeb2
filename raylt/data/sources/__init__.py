"""Data sources: built-in data sets, arrays, folders of images, Hugging Face, street scenes."""
