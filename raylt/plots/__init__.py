"""Pictures of runs, studies and splits."""
