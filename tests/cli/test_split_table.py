from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from raylt.cli.data import _short, split_table


def test_large_counts_of_a_split_are_in_thousands_or_millions():
    assert [_short(n) for n in (99_999, 100_000, 9_876_543, 12_345_678)] == ["99999", "100k", "9877k", "12M"]


CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.parametrize(
    ("width", "heads", "key"),
    [(120, CIFAR10, None), (80, [str(c) for c in range(10)], "0 airplane, 1 automobile"), (60, None, None)],
)
def test_a_split_is_shown_by_client_and_class_where_it_fits(width, heads, key):
    counts = np.arange(50).reshape(5, 10) * 100
    groups = ["many"] * 3 + ["medium"] * 4 + ["few"] * 3
    task = SimpleNamespace(
        class_names=CIFAR10,
        client_names=list("01234"),
        classes=10,
        client_counts=counts,
        sizes=counts.sum(1),
        counts=counts.sum(0),
        groups=groups,
    )
    table = split_table(task, width)
    named = [column.header for column in table.columns]
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    assert named == ["client", *(heads or ["samples", "classes", "of the largest"]), *(["samples"] if heads else [])]
    assert ("4900" in text) == (heads is not None)
    assert (key in text) if key else "0 airplane" not in text
    assert max(map(len, text.splitlines())) <= width
    if heads is None:  # 0 to 900 samples of ten classes: the first client has none of class 0
        assert [cell.split() for cell in list(table.columns[3].cells)[:2]] == [
            ["truck", "20.00", "%"],
            ["truck", "13.10", "%"],
        ]
        assert list(table.columns[2].cells)[:2] == ["9", "10"]
