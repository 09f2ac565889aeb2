"""Output in notebooks, with a stand-in for IPython."""

import sys
from types import SimpleNamespace

import pytest
from rich.table import Table

from raylt.notebook import Output, html_of, html_table, in_notebook


@pytest.fixture
def kernel(monkeypatch):
    """Replace IPython's display; the returned kernel's `outputs` has the updates of each output."""
    outputs: list[list[str]] = []

    def display(html, display_id):
        assert display_id
        outputs.append([html])
        return SimpleNamespace(update=outputs[-1].append)

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    return SimpleNamespace(outputs=outputs)


def test_a_terminal_with_ipython_is_no_notebook(monkeypatch, kernel):
    assert in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: object()))
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_an_output_is_replaced_and_never_repeated(kernel):
    output = Output()
    for number in range(200):
        output.show(str(number))
    assert [len(updates) for updates in kernel.outputs] == [200]
    assert kernel.outputs[0][-1] == "199"


def test_tables_are_html_whose_text_is_escaped():
    text = html_table(["arm", "<b>"], [["a & b", "1.0"]], "t < u", right=[1], notes=["n = 3"])
    assert "a &amp; b" in text
    assert "&lt;b&gt;" in text
    assert "t &lt; u" in text
    assert text.count("text-align:right") == 2
    assert text.endswith("<div>n = 3</div>")


def test_a_table_of_the_terminal_becomes_html():
    table = Table("run", title="runs")
    table.add_column("n", justify="right")
    table.add_row("one", "3")
    text = html_of(table)
    assert "<th" in text
    assert ">one</td>" in text
    assert text.count("text-align:right") == 2
    assert "<thead" not in html_of(Table(show_header=False))
