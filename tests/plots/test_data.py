"""The command `raylt plot data`."""

import numpy as np

from raylt.config import load_data
from raylt.data.task import build_task
from raylt.plots.data import draw_data


def test_classes_are_drawn_in_the_order_of_their_sizes():
    task = build_task(load_data(None, ["data.clients=3", "data.imbalance=10", "data.tail=local"]))
    order = np.argsort(-task.counts, kind="stable")
    assert list(order) != list(range(10))  # the classes are not sorted by size already
    figure = draw_data(task)
    tail, counts = figure.axes[:2]
    heights = [bar.get_height() for bar in tail.patches]
    assert heights == sorted(task.counts.tolist(), reverse=True)
    assert [label.get_text() for label in counts.get_xticklabels()] == [task.class_names[c] for c in order]
    assert counts.images[0].get_array().filled(0).tolist() == task.client_counts[:, order].tolist()
