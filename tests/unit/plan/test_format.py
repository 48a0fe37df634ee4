"""Numbers with units, as reports print them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.plan.format import (
    format_axes,
    format_bytes,
    format_count,
    format_seconds,
    short_operation,
    short_source,
    shorten,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1 << 20, "1.00 MiB"),
        (95 << 30, "95.0 GiB"),
        (1000 << 30, "0.98 TiB"),
        (1536 << 40, "1.50 PiB"),
    ],
)
def test_bytes_are_binary(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12, "12"), (8_030_261_248, "8.03 G"), (999_900, "1.00 M"), (-2500, "-2.50 k")],
)
def test_numbers_are_decimal(value, text):
    assert format_count(value) == text


def test_a_rate_has_its_unit():
    assert format_count(459e12, "FLOP/s") == "459 TFLOP/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (3.52e-5, "35.2 us"),
        (0.0083, "8.30 ms"),
        (5.1, "5.10 s"),
        (190.0, "3.17 min"),
        (5e4, "13.9 h"),
        (1e6, "11.6 days"),
    ],
)
def test_times_choose_their_unit(value, text):
    assert format_seconds(value) == text


@given(st.text(), st.integers(8, 60))
def test_shortened_text_is_never_longer_and_keeps_both_ends(text, width):
    short = shorten(text, width)
    whole = " ".join(text.split())
    assert len(short) <= width
    assert short == whole or (short[0] == whole[0] and short[-1] == whole[-1] and "…" in short)


@pytest.mark.parametrize(
    "folders", ["/home/me/src/fornax/", "/x/site-packages/fornax/", "fornax/", ""]
)
def test_a_source_line_loses_the_folders_above_the_package(folders):
    assert short_source(f"{folders}models/layers.py:88 (MLP)") == "models/layers.py:88 (MLP)"


def test_a_line_of_the_users_own_stays():
    assert short_source("/home/me/train.py:3 (loss)") == "/home/me/train.py:3 (loss)"


def test_an_operation_loses_the_frames_of_tracing():
    name = "jit(step)/transpose(jvp(Decoder))/while/body/checkpoint/mlp/bthd,dhm->btm/dot_general"
    assert short_operation(name) == "mlp/bthd,dhm->btm/dot_general"
    assert short_operation("jit(step)") == "jit(step)"


def test_axes_read_as_a_product():
    assert format_axes(("fsdp", "tensor")) == "fsdp x tensor"
    assert format_axes(()) == "none"
