"""Training agrees with torch, learns, and goes on where it was killed."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from train import Run, Settings, digits, train
from train.adam import DECAY, Adam, decays, step_size
from train.model import ATTENTION, loss_and_gradients, random_parameters

from npattn.errors import MissingExtraError, OptionError

# --- agreement with torch ------------------------------------------------------------------------


def torch_losses(settings, data, steps):
    """The same model, written with torch and its Adam, in float64."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    parameters = random_parameters(settings, *data.x.shape[1:])
    p = {name: torch.tensor(x, requires_grad=True) for name, x in parameters.items()}
    decaying = {name for name, x in parameters.items() if decays(name, x)}
    groups = [
        {"params": [p[n] for n in decaying], "weight_decay": DECAY},
        {"params": [x for n, x in p.items() if n not in decaying], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=settings.lr)
    d, H = settings.embed_dim, settings.num_heads
    batches = -(-len(data.x) // settings.batch_size)
    losses = []
    for step in range(steps):
        epoch, batch = divmod(step, batches)
        order = np.random.default_rng([settings.seed, 1, epoch]).permutation(len(data.x))
        picked = order[batch * settings.batch_size :][: settings.batch_size]
        x, y = torch.tensor(data.x[picked]), torch.tensor(data.y[picked])
        h = x @ p["we"] + p["be"] + p["pos"]
        n = f.layer_norm(h, (d,), p["g1"], p["c1"], 1e-5)
        q, k, v = (
            (n @ p["w" + c] + p["b" + c]).unflatten(-1, (H, d // H)).transpose(1, 2) for c in "qkv"
        )
        o = (q @ k.mT / (d // H) ** 0.5).softmax(-1) @ v
        h = h + o.transpose(1, 2).flatten(2) @ p["wo"] + p["bo"]
        n = f.layer_norm(h, (d,), p["g2"], p["c2"], 1e-5)
        h = h + (n @ p["w1"] + p["b1"]).relu() @ p["w2"] + p["b2"]
        n = f.layer_norm(h, (d,), p["g3"], p["c3"], 1e-5).mean(1)
        loss = f.cross_entropy(n @ p["wc"] + p["bc"], y)
        for group in adam.param_groups:
            group["lr"] = settings.lr * (1 + np.cos(np.pi * step / (settings.epochs * batches))) / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
def test_losses_of_fifty_steps_agree_with_torch():
    pytest.importorskip("sklearn")
    data, settings = digits(), Settings(epochs=40)
    expected = torch_losses(settings, data, 50)
    run = train(Settings(epochs=40), data=data, max_steps=50)
    assert len(run.losses) == 50
    np.testing.assert_allclose(run.losses, expected, rtol=1e-10)


# --- what it learns -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_training_learns_a_simple_task(few):
    run = train(Settings(embed_dim=6, num_heads=3, epochs=60, batch_size=7, lr=2e-2), data=few)
    assert np.mean(run.losses[-5:]) < 0.2 * np.mean(run.losses[:5])
    assert run.epoch == 60
    assert run.accuracies[-1] == run.accuracy(few.test_x, few.test_y)
    weights = run.weights(few.test_x)
    assert weights.shape == (10, 3, 5, 5)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)
    assert run.attention.parameters.keys() == set(ATTENTION)


def test_split_of_digits_is_fixed_and_complete():
    pytest.importorskip("sklearn")
    rows, pixels = digits(), digits("pixels")
    assert (len(rows.x), len(rows.test_x)) == (1438, 359)
    assert (rows.x.shape[1:], pixels.x.shape[1:]) == ((8, 8), (64, 1))
    np.testing.assert_array_equal(rows.test_y, pixels.test_y)
    assert set(rows.test_y) == set(range(10))
    assert rows.x.min() == 0
    assert rows.x.max() == 1


def test_losses_depend_on_the_seed_alone(few, small):
    one, again = train(small, data=few), train(small, data=few)
    assert one.losses == again.losses
    other = train(Settings(embed_dim=6, num_heads=3, epochs=3, batch_size=7, seed=1), data=few)
    assert other.losses != one.losses


def test_each_step_has_its_dropout_mask(few, small):
    settings = dataclasses.replace(small, dropout=0.3)
    run = train(settings, data=few, max_steps=2)
    order = np.random.default_rng([0, 1, 0]).permutation(31)
    p = random_parameters(settings, 5, 3, 4)
    adam = Adam(p)
    for step in range(2):
        batch = order[7 * step : 7 * step + 7]
        keep = np.random.default_rng([0, 2, step]).random((7, 3, 5, 5)) >= 0.3
        loss, d, _ = loss_and_gradients(p, settings, few.x[batch], few.y[batch], keep)
        assert run.losses[step] == loss
        p = adam.update(p, d, step_size(settings.lr, step, 15, 0))


# --- killed and resumed ---------------------------------------------------------------------------


def test_resumed_run_has_the_same_losses(few, small, tmp_path):
    whole = train(small, data=few)

    class Killed(Exception):
        pass

    for stop in (1, 5, 6, 11):
        path = tmp_path / f"run{stop}.npz"

        def killed(step, *_, stop=stop):
            if step == stop:
                raise Killed

        with pytest.raises(Killed):
            train(small, data=few, checkpoint=path, progress=killed)
        assert path.exists() == (stop > 5)  # five steps an epoch
        resumed = train(small, data=few, checkpoint=path)
        assert resumed.losses == whole.losses
        assert resumed.accuracies == whole.accuracies
        for name, x in whole.parameters.items():
            np.testing.assert_array_equal(resumed.parameters[name], x)


def test_resumed_run_goes_on_with_masks_and_loss_scale(few, small, tmp_path):
    """Batches of one overflow in the first epoch, and no longer in the second."""
    options = {"dtype": "float16", "dropout": 0.3, "batch_size": 1, "epochs": 2}
    settings, path = dataclasses.replace(small, **options), tmp_path / "run.npz"
    whole = train(settings, data=few)
    train(settings, data=few, checkpoint=path, max_steps=32)
    assert Run.load(path).loss_scale.scale < 2.0**16
    resumed = train(settings, data=few, checkpoint=path)
    assert resumed.losses == whole.losses
    assert resumed.loss_scale == whole.loss_scale
    assert resumed.adam.step == whole.adam.step < 62


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_process_killed_while_writing_leaves_complete_checkpoint(tmp_path):
    pytest.importorskip("sklearn")
    path = tmp_path / "run.npz"
    flags = ["--epochs", "400", "--embed-dim", "4", "--num-heads", "2", "--checkpoint", str(path)]
    child = subprocess.Popen(
        [sys.executable, "docs/examples/train", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        patience = time.monotonic() + 60
        while not path.exists() and time.monotonic() < patience:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    run = Run.load(path)
    assert 0 < run.epoch < 400
    assert len(run.losses) == run.adam.step == 23 * run.epoch


def test_checkpoint_of_other_settings_raises(few, small, tmp_path):
    path = tmp_path / "run.npz"
    train(small, data=few, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(
        OptionError, match=r"is of a run with lr 0.004, not 0.1, seed 0, not 5; pass"
    ):
        train(Settings(**(vars(small) | {"lr": 0.1, "seed": 5})), data=few, checkpoint=path)
    assert path.read_bytes() == before


def test_incomplete_checkpoint_raises(few, small, tmp_path):
    path = tmp_path / "run.npz"
    train(small, data=few, checkpoint=path)
    whole = path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    for n in (0, 1, 100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:n])
        with pytest.raises(OptionError, match="is no checkpoint of docs/examples/train"):
            Run.load(path)
    np.savez(path, x=np.zeros(3))
    with pytest.raises(OptionError, match="is no checkpoint of docs/examples/train"):
        Run.load(path)
    np.savez(path, settings=json.dumps({"format": 99}))
    with pytest.raises(OptionError, match="another version"):
        Run.load(path)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'npattn\[train\]'"):
        digits()
