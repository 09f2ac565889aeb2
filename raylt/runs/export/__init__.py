"""Export of a run's models: files, graph formats and model cards."""
