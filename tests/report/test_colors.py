"""Laws of colors: contrast of WCAG 2.2 in light and dark, and marks that can be told apart."""

from itertools import combinations

import numpy as np
import pytest
from PIL import ImageColor

from grpo.report.page import HEAT_PERCENT
from grpo.report.style import COLOR_OF_KIND, MARK_COLORS, PAGE_COLORS, VARIABLE_OF_COLOR

LIGHT, DARK = 0, 1
# Linear RGB to OKLab [Ottosson, 2020].
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
# Severity 1.0 of Machado, Oliveira and Fernandes (2009), and the least distance of two marks.
SIGHT = {
    "normal": (np.eye(3), 0.11),
    "protanopia": (
        np.array(
            [
                [0.152286, 1.052583, -0.204868],
                [0.114503, 0.786281, 0.099216],
                [-0.003882, -0.048116, 1.051998],
            ]
        ),
        0.07,
    ),
    "deuteranopia": (
        np.array(
            [
                [0.367322, 0.860646, -0.227968],
                [0.280085, 0.672501, 0.047413],
                [-0.011820, 0.042940, 0.968881],
            ]
        ),
        0.07,
    ),
}


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2: 21 of black on white."""
    low, high = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def distance(one: str, other: str, sight: np.ndarray) -> float:
    """Returns the distance in OKLab: 1 of black and white."""
    seen = [np.clip(sight @ linear(each), 0, 1) for each in (one, other)]
    first, second = (TO_LAB @ np.cbrt(TO_CONES @ each) for each in seen)
    return float(np.linalg.norm(first - second))


def test_contrast_and_distance_of_black_and_white_are_known():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert distance("#000000", "#ffffff", np.eye(3)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("ground", ["card", "paper"])
def test_text_has_a_contrast_of_4_5_and_marks_of_3(scheme: int, ground: str):
    background = PAGE_COLORS[ground][scheme]
    for name in ("ink", "muted", "accent", "good", "bad"):
        assert contrast(PAGE_COLORS[name][scheme], background) >= 4.5, name
    for name, color in MARK_COLORS.items() if ground == "card" else ():
        assert contrast(color[scheme], background) >= 3, name
    assert contrast(PAGE_COLORS["on-banner"][scheme], PAGE_COLORS["banner"][scheme]) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("color", ["blue", "orange"])
def test_the_strongest_cell_of_the_heat_table_leaves_its_text_readable(scheme: int, color: str):
    mixed = [
        round(HEAT_PERCENT / 100 * strong + (1 - HEAT_PERCENT / 100) * weak)
        for strong, weak in zip(
            ImageColor.getrgb(MARK_COLORS[color][scheme]),
            ImageColor.getrgb(PAGE_COLORS["card"][scheme]),
            strict=True,
        )
    ]
    cell = "#" + "".join(f"{channel:02x}" for channel in mixed)
    assert contrast(PAGE_COLORS["ink"][scheme], cell) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
@pytest.mark.parametrize("sight", SIGHT)
def test_marks_are_distinct(scheme: int, sight: str):
    matrix, least = SIGHT[sight]
    for (one, first), (other, second) in combinations(MARK_COLORS.items(), 2):
        assert distance(first[scheme], second[scheme], matrix) >= least, (one, other)


def test_kinds_of_work_in_one_figure_have_different_colors():
    of_compute = ("profile", "sampling", "update", "evaluation", "warmup", "audit")
    of_time = (
        *("profile", "start-up", "sampling", "simulation", "judging", "update", "weights", "other"),
    )
    for kinds in (of_compute, of_time):
        assert len({COLOR_OF_KIND[each] for each in kinds}) == len(kinds)


def test_every_color_of_a_figure_has_its_own_variable():
    assert set(VARIABLE_OF_COLOR.values()) == {"ink", "muted", "lines", *MARK_COLORS}
