"""Execution of a study: scheduler, worker processes, shared training and tuning of arms."""
