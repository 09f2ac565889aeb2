"""The contract of a method: checks that every method must pass, which `raylt check` runs."""
