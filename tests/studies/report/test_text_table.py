"""Tables of comparisons at a terminal."""

from rich.console import Console

from raylt.studies.report.text_table import TextTable


def test_a_title_wider_than_its_table_stays_on_one_line(capsys):
    title = "accuracy on the balanced test set, %, last round"
    further = "claims, one family of two"
    table = TextTable(title, ["arm", "%"], [["sfd", "9"]], "lr", further=[(further, ["a"], [["b"]])])
    Console(width=80).print(table.screen())
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert title in lines
    assert further in lines
