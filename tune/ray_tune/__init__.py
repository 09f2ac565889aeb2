"""Ray Tune: trials as its processes, its schedulers, spaces in its notation, and a run as its trainable class."""
