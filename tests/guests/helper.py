"""A module that shops.py imports."""

from raylt import Uniform

RANGE, WIDTH = Uniform(0, 0.3), 16
