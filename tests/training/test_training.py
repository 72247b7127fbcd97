"""Losses, passes and the loop against float64 transcriptions of the fact sheet's formulas (§1.2, §3.1)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.dspark.load import load_drafter
from training.config import Optimisation, Shape, TrainConfig
from training.data import pack
from training.loss import _rows, block_losses
from training.passes import TargetPass, choose, dense_attention, dense_mask, draft_pass
from training.trainer import Schedule, Trainer
from dspark_runtime.errors import ConfigError
from dspark_runtime.targets import Target
from tests.dspark_runtime.passes import Pages
from tests.drafters import dspark_reference as reference
from tests.drafters.dspark_cases import H, TAPS, V, target
from verify_kernels.rope import cos_sin_table

PLAN = Optimisation(
    steps=6, rows=2, row_length=48, anchors=8, lr=1e-2, muon_lr=1e-2, held_out=0.2, log_every=1, save_every=100
)
SHAPE = Shape(num_hidden_layers=2, target_layer_ids=TAPS, block_size=4, mask_token_id=3, markov_rank=5)
CONFIG = TrainConfig(drafter=SHAPE, training=PLAN)


def conversations(count: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, 14, (count, 2)).astype(np.int32)
    return draw.integers(0, V, int(lengths.sum())).astype(np.int32), lengths


def small_target() -> Target:
    model = target("llama")
    return Target("random", model, None, model.config)


def make(tmp_path, plan: Optimisation = PLAN, shape: Shape = SHAPE, data=None) -> Trainer:
    config = TrainConfig(drafter=shape, training=plan)
    return Trainer(config, small_target(), *(data or conversations()), tmp_path, compile=False)


def randomise(trainer: Trainer) -> None:
    """Weights away from their start, where whole heads are zero."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in trainer.network.parameters():
            p += 0.3 * torch.randn(p.shape, generator=draw)


def alone(model, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden, features) of one conversation in a cache of its own."""
    pages = Pages(model, 1, len(tokens), 4)
    return model.forward(pages.batch([0], [0], [tokens.tolist()]), pages.cache, tuple(TAPS))


# ------------------------------------------------------------------------------------------------ losses


def test_the_fused_losses_are_the_formulas_and_so_are_their_gradients() -> None:
    n, m, d, r = 37, 50, 16, 8
    x = {"h": torch.randn(n, d), "z": torch.randn(n, r), "w2": torch.randn(V, r)}
    x = {name: value.double().requires_grad_() for name, value in x.items()}
    head, other = torch.randn(V, d).double(), torch.randn(m, V).double() * 3
    rows, labels = torch.randint(m, (n,)), torch.randint(V, (n,))
    a, b = torch.rand(n), torch.rand(n)
    loss, ce, tv = block_losses(x["h"], x["z"], head, x["w2"], other, rows, labels, a, b, chunk=10)
    found = torch.autograd.grad(2 * loss, tuple(x.values()))

    logits = x["h"] @ head.T + x["z"] @ x["w2"].T
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    distance = (logits.softmax(1) - other[rows].softmax(1)).abs().sum(1)
    expected = torch.autograd.grad(2 * (a * each + b * distance).sum(), tuple(x.values()))
    torch.testing.assert_close(ce, each.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tv, distance.detach().float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", [48, 4096, 49152, 50001])
def test_the_kernel_is_its_specification(vocab: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    check_kernel(vocab)


def check_kernel(vocab: int) -> float:
    """The Triton kernel against `_rows` in float64 on the same bf16 logits; returns the largest relative error."""
    from training.loss import _normalisers, _rows_triton

    draw = torch.Generator("cuda").manual_seed(vocab)
    logits = (torch.randn(64, vocab, device="cuda", generator=draw) * 4).bfloat16()
    other = (torch.randn(20, vocab, device="cuda", generator=draw) * 4).bfloat16()
    rows = torch.randint(20, (64,), device="cuda", generator=draw)
    labels = torch.randint(vocab, (64,), device="cuda", generator=draw)
    labels[:10] = logits[:10].argmax(1)
    rows[:5] = torch.arange(5, device="cuda")
    logits[:5] = other[:5]  # q = p: no gradient but the label's
    a, b = torch.rand(64, device="cuda", generator=draw), torch.rand(64, device="cuda", generator=draw)
    results = []
    for turn, kind in ((_rows_triton, torch.bfloat16), (_rows, torch.float64)):
        x, y = logits.to(kind, copy=True), other.to(kind)
        ce, tv = (torch.full((64,), torch.nan, device="cuda", dtype=torch.float32) for _ in range(2))
        normaliser = _normalisers(other) if kind == torch.bfloat16 else y.logsumexp(1)
        turn(x, y, normaliser, rows, labels, a, b, ce, tv)
        results.append((x.double(), ce, tv))
    (x, ce, tv), (gold, gold_ce, gold_tv) = results
    torch.testing.assert_close(_normalisers(other).double(), other.double().logsumexp(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ce, gold_ce, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tv, gold_tv, rtol=1e-4, atol=1e-4)
    # Signs of q - p may differ where the two are equal to float32: the first five rows have only the label's part.
    worst = ((x - gold).abs() / (gold.abs() + 1e-6))[5:].quantile(0.999, dim=1).max()
    assert worst < 2**-7
    return float(worst)


# ------------------------------------------------------------------------------------------------ passes


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_training_step_is_the_sum_over_its_blocks_one_by_one(tmp_path, kind: str) -> None:
    """Features, block passes, heads, target distributions and weights, each anchor alone, in float64."""
    trainer = make(tmp_path, shape=SHAPE.model_copy(update={"markov_head_type": kind}))
    randomise(trainer)
    packed, rows = trainer._rows(0)
    seed = (1, 2, 3)
    loss, parts = trainer.losses(packed, rows, seed)

    step = choose(packed, rows, PLAN.anchors, 4, seed, torch.device("cpu"))
    model, w = trainer.target.model, {k: v.detach() for k, v in trainer.network.tensors().items()}
    w |= {"embed_tokens.weight": model.embed, "lm_head.weight": model.lm_head}
    net = reference.Net(w, markov=kind)
    total = dict.fromkeys(("ce", "tv", "confidence", "weight"), 0.0)
    for b, row in enumerate(rows):
        for a, anchor in enumerate(step.anchors[b].tolist()):
            document = packed.documents[row] == packed.documents[row][anchor]
            tokens = torch.from_numpy(packed.tokens[row][document]).long()
            s = int(packed.positions[row][anchor])
            hidden, features = alone(model, tokens)
            target_probs = (hidden.double() @ model.lm_head.double().T).softmax(1)
            h, u = reference.block(net, features[:s], int(tokens[s]))
            state, before = None, int(tokens[s])
            for k in range(4):
                if not packed.anchors[row][anchor] or s + 1 + k >= len(tokens):
                    break
                label, weight = int(tokens[s + 1 + k]), math.exp(-k / 4)
                bias, state = reference.markov(net, h[k], before, state)
                q, p = (u[k] + bias).softmax(0), target_probs[s + k]
                distance = float((q - p).abs().sum())
                sure, overlap = reference.confidence(net, h[k], before), 1 - distance / 2
                total["ce"] -= weight * float(q[label].log())
                total["tv"] += weight * distance
                total["confidence"] -= weight * (overlap * math.log(sure) + (1 - overlap) * math.log(1 - sure))
                total["weight"] += weight
                before = label
    ce, tv, confidence = (total[name] / total["weight"] for name in ("ce", "tv", "confidence"))
    assert parts[:3].tolist() == pytest.approx([ce, tv, confidence], rel=2e-4)
    assert float(loss.detach()) == pytest.approx(0.1 * ce + 0.9 * tv + confidence, rel=2e-4)


def test_the_last_prompt_token_is_an_anchor_and_the_last_token_is_none() -> None:
    packed = pack(np.arange(12, dtype=np.int32), np.array([[3, 4], [2, 3]]), 16, np.array([0, 1]))
    assert packed.tokens[0].tolist() == [*range(12), 0, 0, 0, 0]
    assert packed.documents[0].tolist() == [0] * 7 + [1] * 5 + [-1] * 4
    assert np.flatnonzero(packed.anchors[0]).tolist() == [2, 3, 4, 5, 8, 9, 10]
    assert packed.remaining[0, :12].tolist() == [6, 5, 4, 3, 2, 1, 0, 4, 3, 2, 1, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=90), st.integers(8, 40), st.randoms())
def test_packing_keeps_every_conversation_once_and_whole(pairs, row_length: int, random) -> None:
    lengths = np.array(pairs, dtype=np.int32)
    total = int(lengths.sum())
    tokens = np.arange(1, total + 1, dtype=np.int32)
    order = list(range(len(pairs)))
    random.shuffle(order)
    packed = pack(tokens, lengths, row_length, np.array(order))
    found = []
    for r in range(len(packed)):
        for document in range(packed.documents[r].max() + 1):
            here = packed.documents[r] == document
            assert packed.positions[r][here].tolist() == list(range(here.sum()))
            found.append(packed.tokens[r][here].tolist())
    ends = lengths.sum(1).cumsum()
    whole = [tokens[e - n : e][:row_length].tolist() for e, n in zip(ends, lengths.sum(1))]
    assert sorted(found) == sorted(whole)


def test_the_block_mask_hides_the_future_other_conversations_and_other_blocks() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    mask = dense_mask(documents, torch.tensor([[2, 5]]), 2)[0, 0]
    assert mask.shape == (4, 12)
    for query, seen in enumerate(([0, 1, 8, 9], [0, 1, 8, 9], [3, 4, 10, 11], [3, 4, 10, 11])):
        assert mask[query].nonzero().flatten().tolist() == seen


# ------------------------------------------------------------------------------------------------ the loop


def test_a_killed_run_resumes_and_ends_with_the_same_weights(tmp_path) -> None:
    whole, parts = make(tmp_path / "a"), make(tmp_path / "b")
    assert whole.run(lambda *_: None)
    assert not parts.run(lambda *_: None, until=0.0)
    again = make(tmp_path / "b")
    assert again.done == 1
    assert again.run(lambda *_: None)
    assert [{k: v for k, v in c.items() if k != "seconds"} for c in again.curve] == [
        {k: v for k, v in c.items() if k != "seconds"} for c in whole.curve
    ]
    for (name, p), (_, q) in zip(whole.network.named_parameters(), again.network.named_parameters()):
        assert torch.equal(p, q), name


def test_a_run_starts_at_a_given_drafter(tmp_path) -> None:
    first = make(tmp_path / "a")
    randomise(first)
    first.save()
    args = (CONFIG, small_target(), *conversations(), tmp_path / "b", False)
    second = Trainer(*args, init=tmp_path / "a" / "drafter")
    for name, x in second.network.tensors().items():
        torch.testing.assert_close(x, first.network.tensors()[name].bfloat16().float())
    wide = CONFIG.model_copy(update={"drafter": SHAPE.model_copy(update={"markov_rank": 6})})
    with pytest.raises(ConfigError, match=r"init: .*markov_w1.weight: found \[48, 5\], expected \[48, 6\]"):
        Trainer(wide, *args[1:], init=tmp_path / "a" / "drafter")


def test_a_state_of_another_layout_is_refused(tmp_path) -> None:
    first = make(tmp_path)
    first.save()
    path = tmp_path / "state.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(ConfigError, match=r"state.json: version: found 1, allowed: 2"):
        make(tmp_path)


def test_a_folder_of_another_recipe_is_refused(tmp_path) -> None:
    make(tmp_path).run(lambda *_: None, until=0.0)
    with pytest.raises(ConfigError, match="holds a run of another recipe"):
        make(tmp_path, plan=PLAN.model_copy(update={"steps": 7}))


def test_training_lowers_the_loss_and_the_export_drafts_what_it_learnt(tmp_path) -> None:
    """A target whose next token is a function of the last one is learnt within seconds; the exported folder, loaded by
    the engine's own loader, agrees with the network it came from."""
    tokens, lengths = np.tile(np.arange(V, dtype=np.int32), 40), np.full((40, 2), V // 2, dtype=np.int32)
    plan = PLAN.model_copy(update={"steps": 80, "row_length": V, "rows": 4, "anchors": 16, "ce": 1.0, "tv": 0.0})
    trainer = make(tmp_path, plan=plan, data=(tokens, lengths))
    assert trainer.run(lambda *_: None)
    assert trainer.curve[-1]["ce"] < 0.3 * trainer.curve[0]["ce"]
    drafter = load_drafter(tmp_path / "drafter", trainer.target.model)
    assert drafter.max_depth == 4 and drafter.taps == tuple(TAPS)
    for name, x in drafter.network.tensors().items():
        torch.testing.assert_close(x, trainer.network.tensors()[name].detach().bfloat16().float())


def test_export_splits_files_and_removes_old_ones(tmp_path, monkeypatch) -> None:
    from training import trainer as module

    trainer = make(tmp_path)
    monkeypatch.setattr(module, "SHARD_BYTES", 4000)
    module.export(trainer.network, SHAPE, trainer.target.config, tmp_path / "d")
    many = sorted(p.name for p in (tmp_path / "d").glob("*.safetensors"))
    assert len(many) > 1
    weights = json.loads((tmp_path / "d" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(weights.values())) == many
    monkeypatch.setattr(module, "SHARD_BYTES", 10**9)
    module.export(trainer.network, SHAPE, trainer.target.config, tmp_path / "d")
    assert len(list((tmp_path / "d").glob("*.safetensors"))) == 1
    load_drafter(tmp_path / "d", trainer.target.model)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    schedule = Schedule(PLAN.model_copy(update={"steps": 100, "warmup": 0.1}))
    assert [schedule(i) for i in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert schedule(99) < 1e-3


def test_what_asks_for_gradients_is_the_reference_s() -> None:
    from verify_kernels import ops

    x = torch.randn(3, H, requires_grad=True)
    ops.rms_norm(x, torch.ones(H), 1e-6).sum().backward()
    assert x.grad is not None
    assert ops.chosen("cpu")["rms_norm"] != "verify_kernels.reference.elementwise"


def test_the_target_over_packed_rows_gives_each_conversation_what_it_gets_alone() -> None:
    model = target("llama")
    tokens, lengths = conversations(12, seed=3)
    packed = pack(tokens, lengths, 40, np.arange(12))
    rows = np.arange(len(packed))
    step = choose(packed, rows, 4, 4, (0,), torch.device("cpu"))
    features, hidden = TargetPass(model, len(packed), 40)(step, packed.documents, tuple(TAPS))
    hidden = hidden.view(len(rows), 40, -1)
    for r in rows:
        for document in range(packed.documents[r].max() + 1):
            here = packed.documents[r] == document
            found = alone(model, torch.from_numpy(packed.tokens[r][here]).long())
            torch.testing.assert_close(hidden[r][here], found[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(features[r][here], found[1], rtol=1e-4, atol=1e-4)


def test_draft_pass_shapes(tmp_path) -> None:
    trainer = make(tmp_path)
    packed, rows = trainer._rows(0)
    step = choose(packed, rows, 8, 4, (0,), torch.device("cpu"))
    features, _ = trainer.target_pass(step, packed.documents[rows], tuple(TAPS))
    cos_sin = cos_sin_table(trainer.network.config, 64, "cpu")
    hidden = draft_pass(trainer.network, step, features, cos_sin, dense_mask(step.documents, step.anchors, 4), dense_attention)
    assert hidden.shape == (16, 4, H) and hidden.requires_grad
