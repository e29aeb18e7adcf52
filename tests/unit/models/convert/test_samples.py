"""The samples of the precision check: many, diverse, and one that fills a model."""

from __future__ import annotations

import unicodedata

from shoal.models.convert.samples import LONGEST, TEXTS, load_single_texts


def test_they_are_many_and_different() -> None:
    """Hundreds of distinct texts, from a single character to a paragraph, so that one percent is several texts."""
    assert len(set(load_single_texts())) == len(load_single_texts()) >= 300
    lengths = sorted(map(len, load_single_texts()))
    assert (lengths[0], lengths[len(lengths) // 10] < 30, lengths[-1] > 300) == (1, True, True)


def test_they_are_of_many_scripts() -> None:
    """At least nine writing systems, by the Unicode names of their letters."""
    letters = {character for text in TEXTS for character in text if character.isalpha()}
    assert len({unicodedata.name(letter).split()[0] for letter in letters}) >= 9


def test_the_longest_holds_more_than_most_models_take() -> None:
    """At four characters a token, more than English text has, it is over 512 tokens."""
    assert len(LONGEST) > 512 * 4
