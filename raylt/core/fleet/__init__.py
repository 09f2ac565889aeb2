"""The only way to reach clients: cohorts, reductions, schemas, aggregation, and the transports' common part."""
