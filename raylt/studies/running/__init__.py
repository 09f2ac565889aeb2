"""Running a study: the scheduler, worker processes, shared training, and the tuning of arms."""
