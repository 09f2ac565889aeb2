"""Progress inside the items of `Fleet.map`, worked out by hand."""

import pytest

from raylt.core.fleet.item_progress import ItemsProgress, progress_of_items


def test_progress_shows_the_first_item_under_way_and_counts_the_steps_of_all():
    # two of eight items are done; item 5 has half of its steps and item 2 a quarter
    found = progress_of_items("synthesise", 2, 8, {5: (30, 60), 2: (10, 40)})
    assert found == ItemsProgress("synthesise", 2, 8, 10, 40, pytest.approx(2.75 / 8))
    assert progress_of_items("synthesise", 2, 8, {3: (0, 0)}).share == 2 / 8  # an item of no steps
