"""The command `raylt plot data`."""

from dataclasses import replace

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


def test_one_class_and_one_client_are_counted_in_the_singular():
    task = build_task(load_data(None, ["data.clients=1", "data.partition=iid"]))
    figure = draw_data(replace(task, groups=("many", "few", *["medium"] * 8)))
    keys = [key.get_text() for key in figure.legends[0].get_texts()]
    assert keys == ["many-shot: 1 class", "medium-shot: 8 classes", "few-shot: 1 class"]
    assert figure.get_suptitle().startswith(f"digits: 1 client, {len(task.shards[0])} images, ")
