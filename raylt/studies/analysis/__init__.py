"""Analysis of a study: measures, statistics, comparisons and claims."""
