"""Calls to clients: the fleet, cohorts, reductions and schemas of replies, and the aggregation of replies."""
