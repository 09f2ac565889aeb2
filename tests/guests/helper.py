"""Beside shops.py."""

from raylt.hyper import Uniform

RANGE, WIDTH = Uniform(0, 0.3), 16
