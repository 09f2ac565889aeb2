"""The contract of methods: checks that every method must pass and that `raylt check` runs."""
