"""Letters are the same for everybody, hold pairs out, and the judge reads them."""

import numpy as np
import pytest

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.letters import COLOURS, FONTS, LETTERS, Judge, Letters


def test_every_letter_and_style_is_seen_and_no_held_out_pair_is():
    seen, held = Letters().pairs, Letters(held_out=True).pairs
    assert len(seen) == 182
    assert len(held) == 26
    assert not set(seen) & set(held)
    assert {style for _, style in held} == set(range(len(FONTS)))
    assert {letter for letter, _ in seen} == {letter for letter, _ in held} == set(range(26))
    drawn = {(e.letter, e.style) for e in (Letters()[i] for i in range(1500))}
    assert drawn == set(seen)


def test_an_index_is_one_image():
    letters = Letters(colour=True)
    again = Letters(colour=True, count=10)
    for index in (0, 9):
        np.testing.assert_array_equal(letters[index].image, again[index].image)
    assert letters[0].prompt == again[0].prompt
    assert any((letters[i].image != letters[0].image).any() for i in range(1, 4))
    image = letters[0].image
    assert image.shape == (32, 32, 3)
    assert image.dtype == np.float32
    assert image.min() >= -1
    assert image.max() <= 1
    assert Letters()[0].image.shape == (16, 16, 1)


def test_a_prompt_says_what_is_drawn():
    example = Letters(colour=True)[3]
    style, (front, ground) = list(FONTS)[example.style], example.colours
    assert example.prompt == f"{style} {LETTERS[example.letter]} in {front} on {ground}"
    corner = example.image[0, 0]
    np.testing.assert_allclose(corner, np.array(COLOURS[ground]) / 127.5 - 1, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("colour", [False, True])
def test_the_judge_reads_clean_letters(colour):
    right = []
    for held_out in (False, True):
        letters = Letters(colour=colour, held_out=held_out, seed=5)
        examples = [letters[index] for index in range(2000)]
        found = Judge(letters).judge(np.stack([e.image for e in examples]))
        names = list(COLOURS)
        for row, e in enumerate(examples):
            colours = tuple(names.index(c) for c in e.colours) if e.colours else (-1, -1)
            said = (found.letter[row], found.style[row], found.front[row], found.ground[row])
            right.append(said == (e.letter, e.style, *colours))
    assert np.mean(right) >= 0.995


@pytest.mark.slow
@pytest.mark.parametrize("colour", [False, True])
def test_the_judge_rejects_what_is_no_letter(colour):
    letters = Letters(colour=colour)
    random = np.random.default_rng(0)
    shape, size = letters.shape, letters.shape[0]
    coarse = random.uniform(-1, 1, (500, 4, 4, shape[2]))
    letter = letters[0].image
    images = {
        "uniform": random.uniform(-1, 1, (500, *shape)),
        "normal": random.normal(size=(500, *shape)),
        "blank": np.broadcast_to(random.uniform(-1, 1, (50, 1, 1, shape[2])), (50, *shape)),
        "patches": coarse.repeat(size // 4, 1).repeat(size // 4, 2),
        "faint": 0.1 * letter[None] - 0.9 if not colour else np.full((1, *shape), 0.3),
        "nan": np.full((1, *shape), np.nan),
        "upside down": letter[None, ::-1]
        if letters[0].prompt[-1] in "FGJLPR"
        else letter[None] * 0,
    }
    judge = Judge(letters)
    for name, batch in images.items():
        found = judge.judge(batch.astype(np.float32))
        assert (found.letter == -1).all(), name
        assert (found.style == -1).all(), name


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match="size=4"):
        Letters(size=4)
    with pytest.raises(DataError, match="letter 10 of 10"):
        Letters(count=10)[10]
    with pytest.raises(DataError, match="judge"):
        Judge(Letters()).judge(np.zeros((1, 8, 8, 1), np.float32))
