"""The training loop and the batches it is fed."""

import math

import pytest
import torch
from torch import nn

from mergelab.bench.train import Row, TrainedPart, collate, next_token_loss, parameter_groups, schedule, train


def test_schedule_warms_up_then_falls_to_five_percent():
    values = [schedule(step, 100) for step in range(101)]
    assert values[0] == pytest.approx(0.2)
    assert values[4] == 1
    assert values[100] == pytest.approx(0.05)
    assert values[5:] == sorted(values[5:], reverse=True)


def test_collate_hides_the_given_tokens_and_the_padding():
    ids, labels = collate([Row([5, 6, 7, 8], 2), Row([5, 6], 1)], pad=0)
    assert ids.tolist() == [[5, 6, 7, 8], [5, 6, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 8], [-100, 6, -100, -100]]


def test_next_token_loss_reads_the_position_before():
    logits = torch.full((1, 3, 4), -30.0)
    logits[0, 0, 2] = 30.0
    labels = torch.tensor([[-100, 2, -100]])
    assert float(next_token_loss(logits, labels)) == pytest.approx(0, abs=1e-6)
    assert float(next_token_loss(logits, torch.tensor([[-100, 3, -100]]))) > 10


def test_only_matrices_decay_and_frozen_parameters_are_left_out():
    module = nn.ModuleDict({"embed": nn.Embedding(3, 2), "linear": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    module["frozen"].requires_grad_(False)
    groups = parameter_groups([TrainedPart(module, 0.1), TrainedPart(module["linear"], 9.0)])
    decay = {group["weight_decay"]: {tuple(p.shape) for p in group["params"]} for group in groups}
    assert decay == {0.1: {(2, 2)}, 0.0: {(3, 2), (2,)}}
    assert {group["lr"] for group in groups} == {0.1}


def test_training_lowers_the_loss_and_reports():
    torch.manual_seed(0)
    line = nn.Linear(1, 1)
    lines: list[str] = []
    x = torch.linspace(-1, 1, 9)[:, None]
    before = float((line(x) - 3 * x).square().mean().detach())
    result = train("line", [TrainedPart(line, 0.2)], 60, lambda: (line(x) - 3 * x).square().mean(), lines.append)
    assert result.loss < before / 10
    assert lines[-1].startswith("line: step 60 of 60, loss ")
    assert math.isnan(train("none", [TrainedPart(line, 0.1)], 0, lambda: x.sum(), lines.append).loss)
