"""What every method keeps to, as checks that run on any of them: raylt's own tests, and `raylt check` for one's own."""
