import math

import pytest
import torch

from merges import random
from merges.random import keep_mask, random_bits, standard_normal, stream_key
from tests.oracles.merging import normal_pair, split_mix

KEY = stream_key("mask", 0, "vlm", "model.layers.0.mlp.up_proj.weight")
KNOWN_KEY = -7308768475043437823
KNOWN_MASK = [1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("start", [0, 1, 2**32 - 3, 2**40 + 5])
def test_bits_are_those_of_the_oracle(start: int) -> None:
    expected = [split_mix(KEY, index) for index in range(start, start + 9)]
    assert [bits % 2**64 for bits in random_bits(KEY, start, start + 9).tolist()] == expected


@pytest.mark.parametrize("start", [0, 7, 2**40 + 5])
def test_an_accelerator_is_given_the_same_bits(start: int) -> None:
    # The way of an accelerator, walked on the CPU.
    assert torch.equal(random._bits_by_torch(KEY, start, start + 1000, "cpu"), random_bits(KEY, start, start + 1000))


def test_a_known_stream_stays_as_it_is() -> None:
    # Masks are part of a result's identity: this value may only change together with the arithmetic version.
    assert stream_key("mask", 0, "vlm", "w") == KNOWN_KEY
    assert keep_mask(KNOWN_KEY, 0, 12, 0.5).int().tolist() == KNOWN_MASK


@pytest.mark.parametrize(
    "other",
    [("noise", 0, "vlm", "w"), ("mask", 1, "vlm", "w"), ("mask", 0, "base", "w"), ("mask", 0, "vlm", "v")],
)
def test_each_part_of_the_key_gives_another_stream(other: tuple[str, int, str, str]) -> None:
    one = keep_mask(stream_key("mask", 0, "vlm", "w"), 0, 4096, 0.5)
    two = keep_mask(stream_key(*other), 0, 4096, 0.5)
    assert 0.45 < float((one == two).float().mean()) < 0.55


def test_parts_of_the_key_cannot_run_into_each_other() -> None:
    assert stream_key("mask", 0, "vlm1", "w") != stream_key("mask", 0, "vlm", "1w")


@pytest.mark.parametrize("cut", [0, 1, 7, 500, 999, 1000])
def test_slices_are_parts_of_the_whole(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, noise = keep_mask(KEY, 11, 1000, 0.3), standard_normal(KEY, 11, 1000)
    monkeypatch.setattr(random, "CPU_CHUNK", 64)
    assert torch.equal(mask, torch.cat((keep_mask(KEY, 11, cut, 0.3), keep_mask(KEY, 11 + cut, 1000 - cut, 0.3))))
    assert torch.equal(noise, torch.cat((standard_normal(KEY, 11, cut), standard_normal(KEY, 11 + cut, 1000 - cut))))


@pytest.mark.parametrize("drop_rate", [0.1, 0.5, 0.9, 0.99])
def test_share_kept_is_within_four_sigma(drop_rate: float) -> None:
    count = 400_000
    kept = int(keep_mask(KEY, 0, count, drop_rate).sum())
    assert abs(kept - count * (1 - drop_rate)) < 4 * math.sqrt(count * drop_rate * (1 - drop_rate))


def test_neighbours_are_independent() -> None:
    mask = keep_mask(KEY, 0, 400_000, 0.5).double() - 0.5
    for lag in (1, 2, 3, 64, 576):
        correlation = float((mask[lag:] * mask[:-lag]).mean()) * 4
        assert abs(correlation) < 4 / math.sqrt(400_000 - lag)


def test_drop_rate_zero_keeps_everything_and_higher_rates_drop_more_of_the_same() -> None:
    assert keep_mask(KEY, 0, 10_000, 0.0).all()
    low, high = keep_mask(KEY, 0, 10_000, 0.3), keep_mask(KEY, 0, 10_000, 0.6)
    assert not (high & ~low).any() and (low & ~high).any()


@pytest.mark.parametrize("drop_rate", [1.0, -0.1, math.nan])
def test_drop_rate_outside_its_range_is_refused(drop_rate: float) -> None:
    with pytest.raises(ValueError, match=f"found {drop_rate}"):
        keep_mask(KEY, 0, 3, drop_rate)


def test_no_global_generator_is_touched_or_read() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = standard_normal(KEY, 0, 100)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(one, standard_normal(KEY, 0, 100))


def test_noise_is_that_of_the_oracle() -> None:
    expected = [value for pair in range(50) for value in normal_pair(split_mix(KEY, pair))]
    torch.testing.assert_close(standard_normal(KEY, 0, 100), torch.tensor(expected))


def test_noise_has_the_moments_of_a_normal() -> None:
    noise = standard_normal(KEY, 0, 400_000).double()
    assert torch.isfinite(noise).all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**power).mean()) - moment) < 4 * math.sqrt(variance / 400_000)
    assert abs(float((noise[0::2] * noise[1::2]).mean())) < 4 / math.sqrt(200_000)


@pytest.mark.gpu
def test_f7_a_gpu_draws_the_same() -> None:
    assert torch.equal(keep_mask(KEY, 5, 100_000, 0.9), keep_mask(KEY, 5, 100_000, 0.9, "cuda").cpu())
    torch.testing.assert_close(
        standard_normal(KEY, 5, 100_000), standard_normal(KEY, 5, 100_000, "cuda").cpu(), rtol=2e-7, atol=1e-9
    )
