"""Ray clusters: finding the cluster of a run, authentication, and removal of leftover processes."""
