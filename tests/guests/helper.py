"""Beside shops.py."""

from raylt import Uniform

RANGE, WIDTH = Uniform(0, 0.3), 16
