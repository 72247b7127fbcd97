"""Kimi delta attention (KDA): a short convolution and a gated delta rule over a state a request, under speculation.

The layer's semantics follow vLLM 0.33 (models/kimi_k3) and flash-linear-attention (fla/ops/kda); see `kda_verify`.

**What a speculative pass keeps.** The accepted path is known only after the pass, so either the state of every node is
kept and the accepted one taken over, or the states stay as they are and every token's update is kept and replayed. A
head of Kimi-K3 has a state of S = 128 x 128 float32 = 64 KiB, and one token's update (key, decay, correction, 128
float32 each) takes r = 1.5 KiB. Moved a head and layer, for n verified nodes of which a are accepted:

    states a node   n S written + S read by the next pass                          (n + 1) S
    updates         S + n r in the pass, 2 S + a r by the commit                   3 S + (n + a) r

    KiB                     n = 1     n = 8, a = 6    n = 16, a = 6    n = 32, a = 6
    states a node             128              576             1088             2112
    updates                   195              213              225              249
    memory a request, of a sixteenth of Kimi-K3 (6 heads, 69 layers), MB beside the state's 27
    states a node              27              217              434              868
    updates                   0.6              5.1               10               20

Updates win from 3 nodes on, and on trees by far, so updates are kept. The convolution's window is likewise rebuilt from
the kept inputs: one row of C values a node where a window a node would take K - 1.

**Trees without a state a node.** With G_t the sum of log-decays from the root to node t, the delta rule along a path is

    u_t = beta_t (v_t - exp(G_t) k_t . S_0 - sum over ancestors j of (k_t . exp(G_t - G_j) k_j) u_j)
    o_t = exp(G_t) q_t . S_0 + sum over ancestors j and t itself of (q_t . exp(G_t - G_j) k_j) u_j
    S   = exp(G_t) S_0 + sum over the path to t of u_j (exp(G_t - G_j) k_j)^T

so one unit-triangular system a head, masked by ancestry, gives all u, and every path forks the state by its mask alone.
All exponents are at most 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.batch import PassBatch, Records

CHUNK = 16
"""Committed tokens that a prefill pass takes up at once."""

_EPS = 1e-6  # under the root of the norms of queries and keys


@dataclass
class RecurrencePlan:
    """Index work that all recurrent layers of a pass share: R requests, padded to Q new tokens each."""

    rows: Tensor  # [R] int64 rows of the states
    fresh: Tensor  # [R] bool: no context, the state is zero
    counts: Tensor  # [R] int64 new tokens
    row_of: Tensor  # [R, Q] int64 flat row of padded token (r, j), some valid row beyond the request's count
    padded_of: Tensor  # [N] int64 index of flat row n in the padded [R * Q] layout
    ancestors: Tensor | None  # [R, Q, Q] bool: j is t or an ancestor of t; None: a chain
    taps: Tensor  # [R, Q, K] int64 index into [window; inputs] of each token's convolution inputs, oldest first


def check_pass(batch: PassBatch) -> None:
    """A pass that names no rows of states, or that starts within a tree, raises ValueError."""
    if batch.state_rows is None:
        raise ValueError("state_rows: found none, allowed: a row of the recurrent states for each request")
    if batch.first_query:
        raise ValueError(f"first_query: found {batch.first_query}, allowed: 0 (recurrent layers see whole trees)")


def plan_recurrence(batch: PassBatch, width: int) -> RecurrencePlan:
    """Index work of one pass. width: of the short convolution, K. Raises as `check_pass`."""
    check_pass(batch)
    device = batch.token_ids.device
    n, q = batch.num_tokens, batch.max_query_len
    offsets = batch.request_offsets.long()
    counts = offsets[1:] - offsets[:-1]
    flat = torch.arange(n, device=device)
    request = torch.searchsorted(offsets[1:], flat, right=True)
    local = torch.arange(q, device=device)
    row_of = (offsets[:-1, None] + local).clamp(max=n - 1)
    padded_of = request * q + flat - offsets[request]

    back = torch.arange(width - 1, -1, -1, device=device)  # steps up from the token, oldest first
    if batch.ancestor_masks is None:
        ancestors = None
        taps = (local[:, None] - back + width - 1).expand(len(counts), -1, -1)
    else:
        ancestors = (batch.ancestor_masks[row_of][..., None] >> local) & 1 == 1
        ancestors &= local < counts[:, None, None]
        # Of t's line, root first, node j is the one at `steps` from its end; beyond the root comes the window.
        steps = ancestors.flip(-1).cumsum(-1).flip(-1) - 1
        depth = ancestors.sum(-1, keepdim=True)
        at = (ancestors[..., None, :] & (steps[..., None, :] == back[:, None])).to(torch.uint8).argmax(-1)
        taps = torch.where(back < depth, width - 1 + at, (width - 2 + depth - back).clamp(min=0))
    return RecurrencePlan(batch.state_rows, batch.context_lens == 0, counts, row_of, padded_of, ancestors, taps)


def short_conv(inputs: Tensor, window: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution along each token's own line, then SiLU.

    inputs [R, Q, C], window [R, K - 1, C], weight [C, K] (oldest tap first), taps [R, Q, K] -> [R, Q, C] in inputs'
    dtype, computed in weight's.
    """
    r, q, c = inputs.shape
    seen = torch.cat((window, inputs), dim=1).to(weight.dtype)
    index = taps.reshape(r, -1, 1).expand(-1, -1, c)
    lines = seen.gather(1, index).view(r, q, -1, c)
    return F.silu((lines * weight.T).sum(2)).to(inputs.dtype)


def forget_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log-decay of each key channel: lower_bound * sigmoid(exp(a_log) * (raw + dt_bias)), between lower_bound and 0.

    raw [..., H, D], a_log [H], dt_bias [H, D] -> raw's shape in a_log's dtype.
    """
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * (raw.to(a_log.dtype) + dt_bias))


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, start: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule along every line of a tree, from one state; see the module's docstring.

    q, k, log_decay [R, T, H, Dk], v [R, T, H, Dv], beta [R, T, H], start [R, H, Dv, Dk], ancestors [R, T, T] bool
    (itself included; a parent comes before its children) -> (outputs, updates) [R, T, H, Dv]. One token's step along a
    line is S <- S diag(exp(log_decay)); u = beta (v - S k); S <- S + u k^T; output S q.
    """
    # Sums of many steps in double, so that their differences are exact.
    along = (ancestors.double() @ log_decay.double().flatten(2)).view(log_decay.shape)
    lead = along.exp().to(start.dtype)
    between = (along[:, :, None] - along[:, None]).masked_fill_(~ancestors[..., None, None], float("-inf"))
    faded = between.exp_().to(start.dtype) * k[:, None]  # [R, T, T, H, Dk]: key j as t sees it
    scale = beta.transpose(1, 2)[..., None]
    reads = torch.einsum("rthd,rhvd->rhtv", k * lead, start)
    system = (torch.einsum("rthd,rtjhd->rhtj", k, faded) * scale).tril(-1)  # the solver takes the diagonal as ones
    updates = torch.linalg.solve_triangular(
        system, scale * (v.transpose(1, 2) - reads), upper=False, unitriangular=True
    )
    scores = torch.einsum("rthd,rtjhd->rhtj", q, faded)
    outputs = torch.einsum("rthd,rhvd->rhtv", q * lead, start) + scores @ updates
    return outputs.transpose(1, 2), updates.transpose(1, 2)


def advance(start: Tensor, keys: Tensor, log_decay: Tensor, updates: Tensor, kept: Tensor) -> Tensor:
    """The state after the kept tokens of one line, in order.

    start [R, H, Dv, Dk], keys and log_decay [R, a, H, Dk], updates [R, a, H, Dv], kept [R, a] bool, true ones first ->
    [R, H, Dv, Dk].
    """
    kept = kept[..., None, None]
    log_decay = torch.where(kept, log_decay, 0).double()
    after = log_decay.flip(1).cumsum(1).flip(1)  # its own step included
    total, after = after[:, 0].exp().to(start.dtype), (after - log_decay).exp().to(start.dtype)
    return start * total[:, :, None] + torch.einsum("rjhv,rjhd->rhvd", torch.where(kept, updates, 0), keys * after)


def slide(window: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
    """The convolution's window after the first counts [R] of inputs [R, a, C]. window [R, K - 1, C] -> its shape."""
    seen = torch.cat((window, inputs), dim=1)
    index = counts[:, None] + torch.arange(window.shape[1], device=window.device)
    return seen.gather(1, index[..., None].expand(-1, -1, window.shape[2]))


def _begin(rows: Tensor, fresh: Tensor, state: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    start, before = (torch.where(fresh.view(-1, *[1] * (x.dim() - 1)), 0, x[rows]) for x in (state, window))
    return start, before


def _prepare(
    x: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    window: Tensor,
    plan: RecurrencePlan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(inputs, q, k, v, log_decay, beta), padded; padding decays and updates nothing."""
    heads, dim = dt_bias.shape
    inputs = x[plan.row_of]
    shape = (*plan.row_of.shape, 3, heads, dim)
    q, k, v = short_conv(inputs, window, conv, plan.taps).to(a_log.dtype).view(shape).unbind(2)
    valid = torch.arange(inputs.shape[1], device=x.device) < plan.counts[:, None]
    log_decay = forget_gate(raw_gate[plan.row_of].view(q.shape), a_log, dt_bias, lower_bound)
    beta = torch.sigmoid(raw_beta[plan.row_of].to(a_log.dtype))
    beta = torch.where(valid[..., None], beta, 0)
    log_decay = torch.where(valid[..., None, None], log_decay, 0)
    return inputs, _unit(q) * dim**-0.5, _unit(k), v, log_decay, beta


def kda_verify(
    x: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    window: Tensor,
    plan: RecurrencePlan,
) -> tuple[Tensor, Records]:
    """One KDA layer over new tokens that may be rejected: chains or trees of up to 64 nodes. State and window are only
    read.

    x [N, 3 H D]: queries, keys and values before the convolution; raw_gate [N, H D] and raw_beta [N, H]: forget gate
    and step size before their functions; conv [3 H D, K]; a_log [H], dt_bias [H, D]; state [rows, H, D, D] and window
    [rows, K - 1, 3 H D] of one layer -> (outputs [N, H, D] in x's dtype, records for `commit_states`).

    q, k, v = silu(conv(x)), q and k of unit length (1e-6 under the root), q times D^-1/2; log-decay by `forget_gate`,
    beta = sigmoid(raw_beta); then `delta_rule`. All but the projections in a_log's dtype (float32 or more).
    """
    start, before = _begin(plan.rows, plan.fresh, state, window)
    inputs, q, k, v, log_decay, beta = _prepare(
        x, raw_gate, raw_beta, conv, a_log, dt_bias, lower_bound, before, plan
    )
    ancestors = plan.ancestors
    if ancestors is None:
        ancestors = _chain(k.shape[1], k.device).expand(len(k), -1, -1)
    outputs, updates = delta_rule(q, k, v, log_decay, beta, start, ancestors)
    return outputs.flatten(0, 1)[plan.padded_of].to(x.dtype), Records(inputs, k, log_decay, updates)


def _chain(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def kda_prefill(
    x: Tensor,
    raw_gate: Tensor,
    raw_beta: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    window: Tensor,
    plan: RecurrencePlan,
) -> Tensor:
    """As `kda_verify`, over a chain of committed tokens of any length: state and window are moved past them. A tree
    raises ValueError: which of its tokens are committed is not known."""
    if plan.ancestors is not None:
        raise ValueError("ancestor_masks: found a tree of committed tokens, allowed: a chain, or a speculative pass")
    start, before = _begin(plan.rows, plan.fresh, state, window)
    inputs, q, k, v, log_decay, beta = _prepare(
        x, raw_gate, raw_beta, conv, a_log, dt_bias, lower_bound, before, plan
    )
    outputs = []
    for parts in zip(*(t.split(CHUNK, dim=1) for t in (q, k, v, log_decay, beta))):
        length = parts[0].shape[1]
        out, updates = delta_rule(*parts, start, _chain(length, x.device).expand(len(start), -1, -1))
        kept = torch.ones(len(start), length, dtype=torch.bool, device=x.device)  # padding updates nothing
        start = advance(start, parts[1], parts[3], updates, kept)
        outputs.append(out)
    state[plan.rows] = start
    window[plan.rows] = slide(before, inputs, plan.counts)
    return torch.cat(outputs, dim=1).flatten(0, 1)[plan.padded_of].to(x.dtype)


def commit_states(
    state: Tensor, window: Tensor, records: list[Records], rows: Tensor, context_lens: Tensor, path: Tensor
) -> None:
    """Move the states of all layers past the accepted path, in place.

    state [layers, rows, H, Dv, Dk], window [layers, rows, K - 1, C], records: each layer's, of the same requests in the
    same order; rows [R] int64; context_lens [R]: tokens before the pass; path [R, a] int64: the kept new tokens' node
    indices, ascending, -1 beyond the end.
    """
    kept, nodes = path >= 0, path.clamp(min=0)

    def take(t: Tensor) -> Tensor:
        return t.gather(1, nodes.view(*nodes.shape, *[1] * (t.dim() - 2)).expand(-1, -1, *t.shape[2:]))

    for layer, r in enumerate(records):
        start, before = _begin(rows, context_lens == 0, state[layer], window[layer])
        state[layer][rows] = advance(start, take(r.keys), take(r.log_decay), take(r.updates), kept)
        window[layer][rows] = slide(before, take(r.inputs), kept.sum(1))


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x [..., D] -> rms_norm(x) * weight * sigmoid(gate) in x's dtype, computed in float32 or more; gate [..., D]."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    out = F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps) * torch.sigmoid(gate.to(wide.dtype))
    return out.to(x.dtype)
