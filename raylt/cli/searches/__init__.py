"""`raylt tune`, with raylt's own ASHA and with Ray Tune's schedulers."""
