"""Splits of a data set: long tails, partitions over clients, validation and test parts."""
