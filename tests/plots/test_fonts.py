"""Names that matplotlib's own font lacks are drawn with another installed font, or named in one warning."""

import warnings

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from raylt.plots import fonts
from raylt.plots.style import new_figure, save

CAT, DOG = "猫", "犬"


@pytest.fixture
def font_of_cats(tmp_path, monkeypatch):
    """Install a font that has one character, for this test alone."""
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "cat"])
    builder.setupCharacterMap({ord(CAT): "cat"})
    pen = TTGlyphPen(None)
    for number, corner in enumerate([(0, 0), (0, 700), (700, 700), (700, 0)]):
        pen.lineTo(corner) if number else pen.moveTo(corner)
    pen.closePath()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "cat": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (800, 0), "cat": (800, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Cats", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800, sTypoDescender=-200)
    builder.setupPost()
    path = tmp_path / "cats.ttf"
    builder.save(path)
    installed = [entry for entry in font_manager.fontManager.ttflist if CAT not in fonts._covered(entry.fname)]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", installed)
    font_manager.fontManager.addfont(path)
    fonts._families.cache_clear()
    yield
    fonts._families.cache_clear()


def figure_of(*names: str):
    figure = new_figure(2, 2)
    ax = figure.subplots()
    ax.set_title(names[0])
    ax.set_xlabel(names[-1])
    return figure


def test_an_installed_font_draws_what_matplotlibs_own_lacks(tmp_path, font_of_cats):
    figure = figure_of(f"a {CAT}", "a dog")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "cats.png")
    assert figure.axes[0].title.get_fontfamily()[-1] == "Cats"
    assert "Cats" not in figure.axes[0].xaxis.label.get_fontfamily()


def test_characters_of_no_font_are_named_in_one_warning(tmp_path, font_of_cats):
    figure = figure_of(f"{CAT} {DOG}", f"{DOG}\n\u200b$x$")
    with pytest.warns(UserWarning, match=f"no installed font has these characters: {DOG}. ") as caught:
        save(figure, tmp_path / "cats.png")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "cats.svg")


def test_a_font_that_was_uninstalled_is_passed_over(tmp_path, font_of_cats, monkeypatch):
    entries = font_manager.fontManager.ttflist
    gone = font_manager.FontEntry(fname=str(tmp_path / "gone.ttf"), name="Gone")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [gone, *entries])
    figure = figure_of(CAT)
    save(figure, tmp_path / "cats.png")
    assert figure.axes[0].title.get_fontfamily()[-1] == "Cats"
