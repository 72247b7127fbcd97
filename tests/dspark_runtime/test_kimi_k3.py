"""Kimi-K3's form against a float64 transcription, and its recurrent states behind the engine under speculation."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from drafters.draft_model import DraftModel
from drafters.ngram import NgramDrafter
from drafters.scripted import ScriptedDrafter
from drafters.tree import TreeSpec
from dspark_runtime.configs import find, load_tree
from dspark_runtime.engine import Engine
from dspark_runtime.errors import CheckpointError, ConfigError
from dspark_runtime.models.base import Model
from dspark_runtime.models.kimi_k3 import DummyTensors, KimiK3, kimi_k3_config, tensor_shapes
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.targets import Target, attention_config, load_target
from tests.dspark_runtime import kimi_k3_cases as cases
from tests.dspark_runtime.passes import Pages
from verify_kernels import ops
from verify_kernels.batch import PassBatch

TREE = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3, 5))
EXACT = 1e-11


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Operations of a few microseconds: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def own() -> KimiK3:
    return cases.model()


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return cases.weights(cases.config())


def written(tensors) -> cases.WrittenModel:
    return cases.WrittenModel(cases.config(), tensors)


def near(found: torch.Tensor, want, limit: float = EXACT) -> None:
    want = torch.as_tensor(np.asarray(want))
    assert found.shape == want.shape
    # `Model.logits` are float32
    limit = max(limit, 1e-6) if found.dtype == torch.float32 else limit
    assert (found.double() - want).abs().max() < limit * max(1.0, float(want.abs().max()))


class Rows(Pages):
    """Poisoned pages and states."""

    def __init__(self, model, requests: int, length: int, page_size: int) -> None:
        super().__init__(model, requests, length, page_size)
        self.cache = model.allocate(self.cache.k.shape[1], page_size, requests)
        for x in (self.cache.k, self.cache.states.state, self.cache.states.window):
            x.fill_(float("nan"))

    def batch(self, rows, starts, tokens, tree=None, speculative: bool = False) -> PassBatch:
        made = super().batch(rows, starts, tokens, tree)
        return replace(made, state_rows=torch.tensor(rows), speculative=speculative)


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunks", [[37], [7, 1, 29], [16, 16, 5]])
def test_prompts_in_any_chunks(own, tensors, chunks) -> None:
    prompt, line = ids(37), written(tensors)
    want = [line.step(token) for token in prompt]
    pages, start = Rows(own, 2, 40, 4), 0
    for n in chunks:
        batch = pages.batch([1], [start], [prompt[start : start + n]])
        hidden, features = own.forward(batch, pages.cache, (-1, 0, 1, 2, 3))
        near(own.logits(hidden), [logits for logits, _ in want[start : start + n]])
        near(features, [np.concatenate([after[i] for i in (-1, 0, 1, 2, 3)]) for _, after in want[start : start + n]])
        assert [x.shape for x in batch.experts] == [(n, 2)] * 3
        start += n
    for layer, state in enumerate(line.kda.values()):
        near(pages.cache.states.state[layer, 1], state.state)
        near(pages.cache.states.window[layer, 1], state.window())


def test_requests_of_different_lengths_and_their_trees(own, tensors) -> None:
    """A pass of three prompts, then one of a tree each: every node is what its line would be."""
    prompts, lines = [ids(n, n) for n in (5, 1, 23)], []
    pages = Rows(own, 3, 40, 4)
    hidden, _ = own.forward(pages.batch([2, 0, 1], [0, 0, 0], prompts), pages.cache)
    for prompt in prompts:
        line = written(tensors)
        want = [line.step(token)[0] for token in prompt]
        near(own.logits(hidden[: len(prompt)]), want)
        hidden = hidden[len(prompt) :]
        lines.append(line)
    before = pages.cache.states.state.clone(), pages.cache.states.window.clone()
    nodes = [ids(TREE.num_nodes, 50 + r) for r in range(3)]
    batch = pages.batch([2, 0, 1], [5, 1, 23], nodes, TREE, speculative=True)
    hidden, _ = own.forward(batch, pages.cache)
    logits = own.logits(hidden).view(3, TREE.num_nodes, -1)
    for r, line in enumerate(lines):
        for node in range(TREE.num_nodes):
            path, fork = [node], line.fork()
            while path[0]:
                path.insert(0, TREE.parents[path[0]])
            near(logits[r, node], [fork.step(nodes[r][i])[0] for i in path][-1])
    assert torch.equal(pages.cache.states.state, before[0]) and torch.equal(pages.cache.states.window, before[1])


# ------------------------------------------------------------------------------------------------- behind the engine


def oracle(texts: list[list[int]], seed: int, tree: bool, right: float = 0.7) -> ScriptedDrafter:
    """Drafts that follow the plain texts for a random stretch, on a random line of a random tree."""
    rng = random.Random(seed)
    whole = [p + t for p, t in zip(PROMPTS, texts)]

    def drafts(committed: tuple[int, ...], depth: int):
        text = next((t for t in whole if tuple(t[: len(committed)]) == committed), None)
        future = text[len(committed) :] if text else []
        line = []
        for i in range(depth):
            good = i < len(future) and rng.random() < right
            line.append(future[i] if good else rng.randrange(128))
        if not tree:
            return line
        tokens, parents, levels = [], [], [[0]]  # node 0 is the root, draft i is node i + 1
        for i in range(depth):
            width = rng.randint(1, 3)
            at, trunk = rng.randrange(width), levels[i][0]
            level = []
            above = sorted(rng.choice(levels[i]) for _ in range(width))
            for j in range(width):
                tokens.append(line[i] if j == at else rng.randrange(128))
                parents.append(trunk if j == at else above[j])
                level.append(len(tokens))
            level.insert(0, level.pop(at))
            levels.append(level)
        return tokens, parents

    return ScriptedDrafter(drafts)


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [ids(n, 100 + n) for n in (1, 2, 9, 33, 18)]


def plain(model: Model) -> list[list[int]]:
    return [o.token_ids for o in Engine(model, max_num_requests=2, max_model_len=128).generate(PROMPTS, GREEDY)]


@functools.cache
def made(dtype: torch.dtype) -> tuple[KimiK3, list[list[int]]]:
    """(model, its plain texts)."""
    model = cases.model(dtype)
    return model, plain(model)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def pair(request):
    return made(request.param)


def states_are_exact(engine: Engine, model: KimiK3, limit: float) -> None:
    """What the engine's rows and pages hold is what a fresh pass over each request's context makes."""
    for row, request in enumerate(engine._running):
        context = (request.prompt + request.output)[: request.computed]
        if not context:
            continue
        pages = Rows(model, 1, len(context), 16)
        model.forward(pages.batch([0], [0], [context]), pages.cache)
        at = int(engine._state_rows[row])
        for name in ("state", "window"):
            found, want = (getattr(cache.states, name) for cache in (engine.cache, pages.cache))
            near(found[:, at], want[:, 0].double(), limit)
        logical = torch.arange(len(context))
        for layer in range(len(engine.cache.k)):
            lines = []
            for cache, table in ((engine.cache, engine._page_table[row]), (pages.cache, pages.table[0])):
                size = cache.page_size
                lines.append(cache.k[layer][table.long()[logical // size], logical % size])
            near(lines[0], lines[1].double(), limit)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", ["ngram", "chain", "tree", "file"])
def test_greedy_tokens_equal_plain_decoding(pair, shape: str, rows: int) -> None:
    model, want = pair
    drafter = NgramDrafter() if shape == "ngram" else oracle(want, 7, shape == "tree")
    spec = {"tree": load_tree("tree-16"), "file": load_tree("tree-8")}.get(shape, TreeSpec.chain(5))
    drafter = NgramDrafter() if shape == "file" else drafter
    engine = Engine(model, drafter, spec=spec, max_num_requests=rows, max_model_len=128, max_prefill_tokens=20)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == want
    if shape in ("chain", "tree"):  # some accepted, some rejected
        assert 0 < sum(o.num_accepted for o in outputs) < sum(o.num_drafted for o in outputs)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), tree=st.booleans(), right=st.sampled_from([0.0, 0.5, 1.0]))
def test_states_stay_exact_through_any_history(seed: int, tree: bool, right: float) -> None:
    """Random trees with prefixes accepted and rejected, requests that are preempted, aborted and follow one another in
    a row: at every point the states are those of a fresh pass, and texts stay those of plain decoding."""
    (model, want), rng = made(torch.float64), random.Random(seed)
    drafter = oracle(want, seed, tree, right)
    spec = TreeSpec.chain(4) if not tree else load_tree("tree-16")
    # 12 pages of 8 tokens do not hold three grown requests
    engine = Engine(model, drafter, spec=spec, max_num_requests=3, max_model_len=128, page_size=8, num_pages=13)
    numbers = {engine.submit(p, GREEDY): i for i, p in enumerate(PROMPTS)}
    final: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                final[output.request_id] = output.token_ids
        if rng.random() < 0.2:
            states_are_exact(engine, model, EXACT)
        if rng.random() < 0.03 and engine._running:
            gone = rng.choice(engine._running).request_id
            again = numbers.pop(gone)
            engine.abort(gone)
            numbers[engine.submit(PROMPTS[again], GREEDY)] = again
    assert {numbers[i]: text for i, text in final.items() if i in numbers} == dict(enumerate(want))


def test_preempted_requests_start_over_from_nothing(pair) -> None:
    model, want = pair
    spec = load_tree("tree-8")
    engine = Engine(
        model, oracle(want, 3, True), spec=spec, max_num_requests=4, max_model_len=128, page_size=8, num_pages=13
    )
    assert [o.token_ids for o in engine.generate(PROMPTS, GREEDY)] == want
    assert engine.num_preemptions > 0


def test_sampled_runs_are_their_own_repeats_whatever_shares_the_batch(pair) -> None:
    """A seeded request draws the same tokens plainly and through rejected and accepted trees (rule N couples them)."""
    model, _ = pair
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))]
    want = [o.token_ids for o in Engine(model, max_num_requests=1, max_model_len=128).generate(PROMPTS, params)]
    drafter = oracle(want, 5, True)
    engine = Engine(model, drafter, spec=load_tree("tree-8"), max_num_requests=3, max_model_len=128)
    outputs = engine.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == want and sum(o.num_accepted for o in outputs) > 0


def test_bfloat16_runs_end_to_end() -> None:
    target = load_target("kimi-k3-tiny", weights="dummy", device="cpu", max_model_len=128)
    assert target.model.dtype == torch.bfloat16 and isinstance(target.model, Model)
    engine = Engine(target.model, NgramDrafter(), spec=load_tree("tree-8"), max_num_requests=3)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert all(len(o.token_ids) == 24 and o.finish_reason == "length" for o in outputs)
    c = target.config
    latent = c.mla.layers * c.mla.kv_values * 2
    state = c.kda.layers * (c.kda.heads * 32 * 32 * 4 + 3 * 3 * c.kda.heads * 32 * 2)
    assert engine.cache.bytes_per_token == latent == c.facts.kv_values_per_token() * 2
    assert engine.cache.states.bytes_per_request == state


def test_dspark_check_finds_it_sound() -> None:
    from eval.check import check_pair

    model, _ = made(torch.float32)
    lines: list[str] = []
    target = Target("kimi-k3-tiny", model, None, model.config)
    rows = check_pair(target, NgramDrafter(), 4, None, None, 0.1, 0.0, None, lines.append)
    assert [r["check"] for r in rows] == ["prompt_lengths", "chain", "tree", "al"] and all(r["passed"] for r in rows)
    assert any("not checked, recurrent layers do not draft" in line for line in lines)


# ---------------------------------------------------------------------------------------------- weights, configurations


def test_tensors_of_the_released_model() -> None:
    """Shapes that public readers of the checkpoint state, and the published total."""
    c = kimi_k3_config("kimi-k3")
    shapes = {name: shape for name, (shape, _) in tensor_shapes(c).items()}
    assert [i for i in range(93) if not c.is_kda(i)] == [*range(3, 92, 4), 92]
    layer = "model.layers.1."
    for name, shape in {
        "model.embed_tokens.weight": (163840, 7168),
        "model.layers.0.mlp.gate_proj.weight": (33792, 7168),
        f"{layer}self_attn.f_a_proj.weight": (128, 7168),
        f"{layer}self_attn.q_conv1d.weight": (12288, 1, 4),
        f"{layer}self_attn.A_log": (96,),
        f"{layer}self_attn.dt_bias": (12288,),
        "model.layers.3.self_attn.q_b_proj.weight": (18432, 1536),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.3.self_attn.kv_b_proj.weight": (24576, 512),
        f"{layer}block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
        f"{layer}block_sparse_moe.shared_experts.gate_proj.weight": (6144, 7168),
        f"{layer}block_sparse_moe.experts.gate_up.weight_packed": (896, 6144, 1792),
        f"{layer}block_sparse_moe.experts.down.weight_scale": (896, 3584, 96),
    }.items():
        assert shapes[name] == shape
    values = {"weight_packed": 2, "weight_scale": 0}  # of one stored byte
    count = sum(math.prod(shape) * values.get(name.split(".")[-1], 1) for name, shape in shapes.items())
    assert count == pytest.approx(c.facts.total_params, rel=1e-5)


def test_dummy_weights_are_seeded_and_in_their_formats() -> None:
    c = cases.config()
    a, b, other = (DummyTensors(c, seed, torch.bfloat16, "cpu") for seed in (0, 0, 1))
    assert list(a) == list(tensor_shapes(c)) and len(a) == len(list(a))
    for name in a:
        found = a[name]
        assert tuple(found.shape) == tensor_shapes(c)[name][0]
        raw = [t[name].view(torch.uint8) for t in (a, b, other)]
        assert torch.equal(raw[0], raw[1])
        if "norm" not in name and not name.endswith("scale"):
            assert not torch.equal(raw[0], raw[2])
    kinds = {name.split(".")[-1]: a[name].dtype for name in a}
    assert kinds["A_log"] == kinds["dt_bias"] == torch.float32
    assert kinds["weight_packed"] == kinds["weight_scale"] == torch.uint8 and kinds["weight"] == torch.bfloat16


def broken(field: str, old: str, new: str, tmp_path) -> str:
    text = find("models", "kimi-k3-tiny").read_text()
    assert old in text
    path = tmp_path / f"{field}.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("kda: {layers: 3", "kda: {layers: 4", "ffn: found 4 layers, allowed: as many as attention has"),
        ("gate_rank: 32, gate_lower_bound: -5.0", "gate_rank: 32", "gate_lower_bound: found None"),
        (", gated: true", "", "attention.mla.gated: found False, allowed: true"),
        (", norm_eps: 1.0e-5", "", "attention.mla.norm_eps: found None"),
        ("expert_hidden_size: 32", "expert_hidden_size: 40", "multiples of 32"),
        ("expert_hidden_size: 32, ", "", "expert_hidden_size: found 0"),
        ("experts: mxfp4", "experts: bf16", "weights.experts: found bf16, allowed: mxfp4"),
        ("  situ: {beta: 4.0, linear_beta: 25.0}\n", "", r"does not run here \(ffn.situ\)"),
        ("gate_lower_bound: -5.0", "gate_lower_bound: 5.0", "attention.kda.gate_lower_bound"),
    ],
)
def test_broken_architectures_are_named(tmp_path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        kimi_k3_config(broken("x", old, new, tmp_path))
    assert "\n" not in str(error.value)


def test_what_does_not_run_says_so(own, tensors, tmp_path) -> None:
    with pytest.raises(ConfigError, match="kimi-k3 takes 1560 GB of weights, this machine has .*--rank-of N"):
        load_target("kimi-k3", weights="dummy", device="cpu")
    with pytest.raises(ConfigError, match="kimi-k3 is an architecture without weights"):
        load_target("kimi-k3")
    with pytest.raises(ConfigError, match=r"deepseek-v4-flash holds facts .* does not run here \(attention.kda\)"):
        load_target("deepseek-v4-flash", weights="dummy")
    with pytest.raises(ConfigError, match="drafter: draft:test has recurrent layers, allowed: attention only"):
        Engine(own, DraftModel(own), spec=TreeSpec.chain(2), max_model_len=64)
    with pytest.raises(ConfigError, match="target: found kimi-k3-tiny, allowed: Llama, Qwen3 and Qwen3-MoE"):
        attention_config("kimi-k3-tiny")
    with pytest.raises(ConfigError, match="device: found cuda, allowed: cpu"):
        KimiK3(cases.config(), tensors, name="x", dtype=torch.float32, device="cuda")
    with pytest.raises(ConfigError, match="max_model_len: found 4096, allowed: 1 to 2048"):
        cases.model(max_model_len=4096)
    pages = Rows(own, 1, 8, 4)
    with pytest.raises(ConfigError, match="test has recurrent layers"):
        own.forward(Pages.batch(pages, [0], [0], [[1]]), pages.cache)
    with pytest.raises(ConfigError, match=r"taps: found \[4\], allowed: decoder layers 0 to 3"):
        own.forward(pages.batch([0], [0], [[1]]), pages.cache, (4,))
    for name, wrong, message in (
        ("lm_head.weight", None, "lm_head.weight: missing"),
        ("model.layers.1.self_attn.A_log", torch.zeros(3), r"A_log: found shape \[3\], expected \[2\]"),
        (
            "model.layers.1.block_sparse_moe.experts.down.weight_packed",
            torch.zeros(8, 32, 16),
            "weight_packed: found dtype torch.float32, expected torch.uint8",
        ),
    ):
        some = {k: v for k, v in tensors.items() if k != name} | ({} if wrong is None else {name: wrong})
        with pytest.raises(CheckpointError, match=message):
            KimiK3(cases.config(), some, name="x", dtype=torch.float32, device="cpu")
    with pytest.raises(CheckpointError, match="more: not a tensor of this architecture"):
        KimiK3(cases.config(), tensors | {"more": torch.zeros(1)}, name="x", dtype=torch.float32, device="cpu")


# ----------------------------------------------------------------------------------------- a public implementation


def test_layers_of_transformers_kimi_linear(own, tensors) -> None:
    """The parts that transformers' Kimi Linear shares: convolution, delta rule, gated norm, latent attention."""
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    from verify_kernels.reference.recurrence import forget_gate

    heads, dim, n = 2, 32, 29
    layer = own.layers[1].mixer
    g = torch.Generator().manual_seed(0)
    x, raw, beta = (torch.randn(n, k, generator=g) for k in (3 * heads * dim, heads * dim, heads))
    conv, a_log, dt_bias = (t.float() for t in (layer.conv, layer.a_log, layer.dt_bias))
    pages = Rows(own, 1, n, 16)
    plan = ops.plan_recurrence(pages.batch([0], [0], [[1] * n]), 4)
    state, window = torch.zeros(1, heads, dim, dim), torch.zeros(1, 3, 3 * heads * dim)
    found = ops.kda_prefill(x, raw, beta, conv, a_log, dt_bias, -5.0, state, window, plan)

    mixed = theirs.causal_conv1d_fn(x.T[None], conv, activation="silu")[0].T
    q, k, v = mixed.view(1, n, 3, heads, dim).unbind(2)
    decay = forget_gate(raw.view(1, n, heads, dim), a_log, dt_bias, -5.0)
    for rule in (theirs.recurrent_kimi_delta_attention, theirs.chunk_kimi_delta_attention):
        out, last = rule(
            q, k, v, g=decay, beta=beta.sigmoid()[None], initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        near(found, out[0].double(), 1e-5)
        near(state[0], last[0].transpose(1, 2).double(), 1e-5)
    norm = theirs.KimiLinearRMSNormGated(dim, eps=1e-5)
    norm.weight.data = layer.norm.float()
    gate = torch.randn(n, heads, dim, generator=g)
    near(ops.gated_rms_norm(found, layer.norm.float(), gate, 1e-5), norm(found, gate).double().detach(), 1e-5)

    m = own.config.mla
    small = KimiLinearConfig(
        hidden_size=64, num_attention_heads=m.heads, num_key_value_heads=m.heads, q_lora_rank=m.q_lora_rank,
        kv_lora_rank=m.kv_lora_rank, qk_nope_head_dim=m.qk_nope_head_dim, qk_rope_head_dim=m.qk_rope_head_dim,
        v_head_dim=m.v_head_dim, attn_implementation="eager", num_hidden_layers=4,
    )  # fmt: skip
    attention = theirs.KimiLinearAttention(small, 3).double()
    prefix = "model.layers.3.self_attn."
    same = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix) and "g_proj" not in k}
    attention.load_state_dict(same)
    for part in (attention.q_a_layernorm, attention.kv_a_layernorm):
        part.variance_epsilon = m.norm_eps
    x = torch.randn(n, 64, generator=g, dtype=torch.float64)
    causal = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    want = attention(x[None], causal)[0][0].detach()
    mixer = own.layers[3].mixer
    ungated = mixer.in_proj.clone()
    ungated[-m.heads * m.v_head_dim :] = 0  # a gate of one half everywhere
    batch = pages.batch([0], [0], [[1] * n])
    plan = ops.plan_latent_attention(batch, 16)
    found = own._latent_attention(x, replace(mixer, in_proj=ungated), batch, pages.cache.k[0], plan)
    near(2 * found, want, 1e-5)  # theirs takes float32 steps on the way
