"""Models taken out of a run: files, graph formats, model cards."""
