"""The contract of a method: checks that every method must pass and that `raylt check` runs."""
