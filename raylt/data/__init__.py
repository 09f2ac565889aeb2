"""Data sets, their long-tailed subsets, and their partitions over clients.

Modules for building a task use NumPy alone, without torch.
"""
