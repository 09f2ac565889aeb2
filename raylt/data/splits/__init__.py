"""Splits: long tails, partitions over clients, validation and test parts."""
