import pytest
import torch
from torch import nn

from lightning_robustness.attacks import PGD, SirenAttack, get_attack, run_attack
from lightning_robustness.attacks.attack import most_passes
from lightning_robustness.input_space import InputSpace

AUDIO = InputSpace(low=-1.0, high=1.0)
LENGTH = 64


@pytest.fixture(scope="module")
def tones():
    """Tones of four frequencies with random phases and noise, in [-1, 1]."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(600) % 4
    phase = 2 * torch.pi * torch.rand(600, 1, generator=generator)
    time = torch.arange(LENGTH) / LENGTH
    x = 0.6 * torch.sin(2 * torch.pi * (3 + 2 * y.unsqueeze(1)) * time + phase)
    return (x + 0.1 * torch.randn(x.shape, generator=generator)).clamp(-1, 1).unsqueeze(1), y


@pytest.fixture(scope="module")
def tone_network(tones):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2),
        nn.ReLU(),
        nn.Conv1d(16, 16, 9, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    network(tones[0][:2])
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(tones[0]), tones[1]).backward()
        optimizer.step()
    return network.eval()


def test_swarm_beats_as_many_random_perturbations(tones, tone_network):
    x, y = tones[0][:80], tones[1][:80]
    attack = SirenAttack(eps=0.4, steps=20, num_particles=10)
    result = run_attack(tone_network, attack, x, y, input_space=AUDIO)
    noise = torch.empty(200, *x.shape).uniform_(-0.4, 0.4)
    broken = torch.stack([tone_network((x + n).clamp(-1, 1)).argmax(1) != y for n in noise]).any(dim=0)
    assert result.preds.eq(y).float().mean() > 0.95
    assert result.success_rate > (broken & result.eligible).sum() / result.eligible.sum() + 0.2
    assert result.linf.max() <= 0.4 + 1e-6
    assert result.x_adv.abs().max() <= 1
    assert (result.queries[result.eligible] % 10 == 0).all()
    assert result.queries.max() <= 200


def test_white_box_form_refines_what_the_swarm_found(tones, tone_network):
    x, y = tones[0][:60], tones[1][:60]
    options = {"eps": 0.4, "steps": 4, "num_particles": 5, "alpha": 0.05}
    black = run_attack(tone_network, SirenAttack(**options), x, y, input_space=AUDIO)
    white = run_attack(tone_network, SirenAttack(**options, gradient_steps=10), x, y, input_space=AUDIO)
    pgd = run_attack(tone_network, PGD(eps=0.4, alpha=0.05, steps=10), x, y, input_space=AUDIO)
    assert (white.success | ~black.success).all()
    assert white.success_rate > black.success_rate
    assert white.success_rate >= pgd.success_rate - 0.05
    assert (white.queries[black.success] == black.queries[black.success]).all()


def test_more_iterations_break_more(tones, tone_network):
    x, y = tones[0][:60], tones[1][:60]
    rates = [
        run_attack(
            tone_network, SirenAttack(eps=0.4, steps=steps, num_particles=8), x, y, input_space=AUDIO
        ).success_rate
        for steps in (1, 10, 40)
    ]
    assert rates[0] < rates[1] < rates[2]


def test_preset_of_the_speech_experiment_breaks_everything(tones, tone_network):
    x, y = tones[0][:40].squeeze(1), tones[1][:40]
    result = run_attack(
        lambda audio: tone_network(audio.unsqueeze(1)), get_attack("siren", preset="speech"), x, y, input_space=AUDIO
    )
    assert result.success_rate == 1


def test_targeted_and_all_steps(tones, tone_network):
    x, target = tones[0][:40], (tones[1][:40] + 1) % 4
    attack = SirenAttack(
        eps=0.6, steps=15, num_particles=6, gradient_steps=5, targeted=True, all_steps=True, patience=3
    )
    result = run_attack(tone_network, attack, x, target, input_space=AUDIO)
    assert (result.queries == 15 * 6 + 5).all()
    assert most_passes(attack) == 15 * 6 + 5
    assert result.success_rate > 0.5
    assert (result.adv_preds[result.success] == target[result.success]).all()


def test_images_are_refused(digits, digits_network):
    with pytest.raises(ValueError, match=r"SirenAttack .*\(4, 1, 8, 8\).*Square"):
        run_attack(digits_network, SirenAttack(), digits[0][:4], digits[1][:4])
