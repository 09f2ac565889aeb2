"""Studies: arms, cells and paired seeds; what ran, what it shows, and whether a paper's figure came out."""
