"""What a person says with -m: the whole is the description, a part of it the prediction."""

import pytest

from nightshift.campaign.records import prediction_in


@pytest.mark.parametrize(
    ("description", "prediction"),
    [
        ("", None),
        ("lr 3e-6 -> 5e-6: expect +1 pp", "expect +1 pp"),
        ("lr 3e-6 -> 5e-6: Expected to be worse", "Expected to be worse"),
        ("batch 256 -> 128: +1 pp, twice the steps, noisier gradient", "+1 pp, twice the steps, noisier gradient"),
        ("schedule: cosine: +0.5 pp", "+0.5 pp"),
        ("hot: expect less entropy: \N{MINUS SIGN}2 pp", "expect less entropy: \N{MINUS SIGN}2 pp"),
        ("a warm-up: 2 percentage points better", "2 percentage points better"),
        ("a warm-up:+1 pp", None),  # as in a key or a time
        ("warm-up: because steps 1 to 20 are wild", None),
        (": +1 pp", "+1 pp"),
        ("lr up:\nexpect +1 pp,\ttwice", "expect +1 pp, twice"),  # as the record has it
    ],
)
def test_the_prediction_in_a_description(description: str, prediction: str | None) -> None:
    assert prediction_in(description) == prediction
