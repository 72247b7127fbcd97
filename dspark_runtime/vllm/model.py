"""vLLM's `Qwen3DSparkModel` by this project: vLLM's backbone, all Markov heads, checked weights, one function to draft.

The draft layers, their attention and their cache are vLLM's (`vllm.model_executor.models.qwen3_dspark`). Ours are: what
the checkpoint says (`drafters.dspark`, in its dialects), its check tensor by tensor, gated and rnn heads and drafters
without one, and the sequential stage (`sample_sequential`, which vLLM's speculator calls once a step).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.transformers_utils.repo_utils import get_hf_file_bytes
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from drafters.dspark import calibration
from drafters.dspark.config import DrafterConfig
from drafters.dspark.dialects import parse
from drafters.dspark.load import canonical, check_tensors
from dspark_runtime.vllm import SWITCH
from dspark_runtime.vllm.markov import Pick, chain, draw
from verify_kernels.markov import Markov

logger = init_logger("vllm.dspark_runtime")  # vLLM's log handlers are those of "vllm"

_GATES = {"gated": "gate_proj", "rnn": "joint_proj"}  # the checkpoint's names
_AWAY = f"; {SWITCH}=0 leaves this drafter to vLLM"


def describe(vllm_config: VllmConfig) -> DrafterConfig:
    """What the draft checkpoint's config.json says, checked against the target and against how vLLM reads it.

    Raises ValueError, one line: file, field, what was found and what is allowed.
    """
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    path = f"{draft.model}/config.json"
    content = get_hf_file_bytes("config.json", draft.model, draft.revision)
    if content is None:
        raise ValueError(f"{path}: missing")
    target = vllm_config.model_config
    depth = target.get_total_num_hidden_layers()
    try:
        values = json.loads(content)
        c = parse(values, path, depth)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"{error}{_AWAY}") from None

    def need(ok: bool, field: str, found: object, allowed: object) -> None:
        if not ok:
            raise ValueError(f"{path}: {field}: found {found}, allowed: {allowed}")

    hf = draft.hf_config
    hidden, vocab = target.get_hidden_size(), target.get_vocab_size()
    need(c.kind != "eagle3" and c.layers == "qwen3", "architectures", values.get("architectures"),
         "DSpark and DFlash drafters with Qwen3 layers")  # fmt: skip
    need(c.target_hidden_size == hidden, "target_hidden_size", c.target_hidden_size, f"{hidden}, the target's")
    need(max(c.taps) < depth, "target layers", list(c.taps), f"up to {depth - 1}, the target's last")
    need(c.num_target_layers in (None, depth), "num_target_layers", c.num_target_layers, f"{depth}, the target's")
    need(c.vocab_size >= vocab, "vocab_size", c.vocab_size, f"{vocab} and up, the target's")
    need(not any(c.windows), "layer_types", "sliding_attention", f"full_attention{_AWAY}")
    scale = values.get("logit_scale") or 1.0
    need(scale == 1.0, "logit_scale", scale, f"1.0{_AWAY}")
    need(draft.quantization is None, "quantization", draft.quantization, f"none{_AWAY}")
    topk = getattr(hf, "dspark_draft_topk", None)
    need(topk is None or c.markov_head_type == "vanilla", "dspark_draft_topk", topk,
         f"none with a head of type {c.markov_head_type}")  # fmt: skip
    # vLLM's speculator has read its own view of these already, from more places than one dialect has.
    aux = get_eagle3_aux_layers_from_config(speculative) or ()
    for field, theirs, ours in (
        ("target layers", [i - 1 for i in aux], list(c.taps)),
        ("mask_token_id", get_parallel_drafting_token_id(hf), c.mask_token_id),
        ("sample_from_anchor", bool(getattr(hf, "sample_from_anchor", True)), c.sample_from_anchor),
    ):
        need(theirs == ours, field, f"{theirs} by vLLM's reading", f"{ours}, as the checkpoint's dialect means it")
    if speculative.num_speculative_tokens > c.num_drafts:
        logger.warning(
            "num_speculative_tokens: found %d, the drafter is trained for %d; drafts past it are rarely accepted",
            speculative.num_speculative_tokens,
            c.num_drafts,
        )
    return c


class DSparkForCausalLM(Qwen3DSparkForCausalLM):
    """A DSpark (or DeepSpec DFlash) drafter: vanilla, gated, rnn or no Markov head, with or without confidence head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        c = describe(vllm_config)
        speculative = vllm_config.speculative_config
        draft = speculative.draft_model_config
        # vLLM's class reads these at the top level only, where not every dialect has them.
        draft.hf_config.update({
            "markov_rank": c.markov_rank,
            "enable_confidence_head": c.confidence != "none",
            "confidence_head_with_markov": c.confidence == "markov",
            "draft_vocab_size": c.draft_vocab_size,
            "target_hidden_size": c.target_hidden_size,
        })  # fmt: skip
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.dspark, self.source = c, str(draft.model)
        r, d, head = c.markov_rank, c.hidden_size, self.model.markov_head
        if c.markov_head_type is None:
            self.model.markov_head = None
        elif c.markov_head_type != "vanilla":
            # Not under the checkpoint's name: vLLM's loader would merge a gate_proj with an MLP's up_proj.
            head.gates = nn.Linear(d + r, r) if c.markov_head_type == "gated" else nn.Linear(2 * r + d, 3 * r)
        temperatures = _temperatures(self.source, c, speculative.num_speculative_tokens)
        self.register_buffer("temperatures", temperatures, persistent=False)
        logger.info(
            "DSpark drafter of dspark-runtime: %s, %s Markov head of rank %d, %d drafts a block, confidence %s%s",
            self.source, c.markov_head_type or "no", r, c.num_drafts, c.confidence,
            "" if temperatures is None else ", calibrated",
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError, one line, for a file, tensor or shape that a drafter of this configuration cannot have."""
        c = self.dspark
        tensors = {canonical(name): tensor for name, tensor in self._readable(weights)}
        shapes = check_tensors(c, tensors, self.source)
        for key, rows, vocab in (
            ("embed_tokens.weight", c.vocab_size, self.target_vocab_size),
            ("lm_head.weight", c.draft_vocab_size, self.target_vocab_size),
        ):
            if key not in tensors and (rows, c.hidden_size) != (vocab, c.target_hidden_size):
                raise ValueError(
                    f"{self.source}: {key}: missing, expected shape {[rows, c.hidden_size]} (the target's "
                    f"{[vocab, c.target_hidden_size]} does not fit)"
                )
        wanted = {*shapes, "embed_tokens.weight", "lm_head.weight", "d2t"}
        if extra := _GATES.get(c.markov_head_type):
            for part in ("weight", "bias"):
                key = f"markov_head.{extra}.{part}"
                getattr(self.model.markov_head.gates, part).data.copy_(tensors[key])
                wanted.remove(key)
        super().load_weights((key, x) for key, x in tensors.items() if key in wanted)
        if "mask_embedding" in tensors:
            self.model.mask_embedding.data.copy_(tensors["mask_embedding"].flatten())
            self.model.mask_token_id, self.model.has_separate_mask_embedding = c.mask_token_id, True

    def _readable(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from weights
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.source}: not readable safetensors ({error})") from None

    def _head(self) -> Markov | None:
        """The Markov head's weights as they are now; vLLM pads the rows of w2."""
        head, kind = self.model.markov_head, self.dspark.markov_head_type
        if head is None:
            return None
        gates = (head.gates.weight, head.gates.bias) if kind in _GATES else ()
        return Markov(kind, head.markov_w1.weight, head.markov_w2.weight[: self.dspark.draft_vocab_size], *gates)

    # ---------------------------------------------------------------------------------------------------- drafting

    def sample_sequential(self, speculator: Any, num_reqs: int, head_hidden: Tensor) -> bool:
        """vLLM's hook: draft all slots of num_reqs requests from head_hidden [tokens, d] into the speculator's buffers
        (draft_tokens; draft_logits of probabilistic drafting; confidences for adaptive verification). Always True."""
        n = speculator.num_speculative_steps
        hidden = head_hidden[speculator.sample_indices[: num_reqs * n]]
        base = self.compute_draft_logits(hidden).view(num_reqs, n, -1)
        hidden, head = hidden.view(num_reqs, n, -1), self._head()
        anchors = speculator.input_buffers.input_ids[speculator._anchor_idx[:num_reqs]].long()
        why = why_not_fused(speculator, head, base)
        if why is not None:
            logger.warning_once("DSpark drafts step by step, with vLLM's sampler: %s", why)
            tokens = chain(head, base, hidden, anchors, self._pick_by_vllm(speculator, num_reqs))
        elif base.is_cuda:
            from dspark_runtime.vllm import markov_triton

            tokens = markov_triton.chain(head, base, hidden, anchors, speculator)
        else:
            tokens = chain(head, base, hidden, anchors, self._pick(speculator, num_reqs))
        speculator.draft_tokens[:num_reqs] = tokens
        if speculator.use_confidence_head:
            before = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1).flatten()
            embeds = hidden.flatten(0, 1) if head is None else F.embedding(before, head.w1)
            sure = self.compute_confidence(hidden.flatten(0, 1), embeds)
            speculator.draft_token_confidence_probs[:num_reqs] = sure.view(num_reqs, n)
        return True

    def compute_confidence(self, head_hidden: Tensor, markov_embed: Tensor) -> Tensor:
        """head_hidden [R * K, d] and markov_embed [R * K, r] (unread by a head without it), request by request ->
        probabilities [R * K] float32, at the temperatures of the checkpoint's calibration.json."""
        logits = self.model.confidence_head(head_hidden, markov_embed)
        if self.temperatures is not None:
            logits = (logits.view(-1, len(self.temperatures)) / self.temperatures).flatten()
        return torch.sigmoid(logits)

    def _pick(self, speculator: Any, num_reqs: int) -> Pick:
        """Each step's tokens in torch. On a CPU, where no batch is padded for a graph."""
        cache, columns = speculator.draft_logits, speculator._d2t_scatter_index
        if cache is None:
            return lambda logits, k: self.map_draft_to_target(logits.argmax(dim=-1))
        rows, positions = _slots(speculator, num_reqs)

        def pick(logits: Tensor, k: int) -> Tensor:
            if columns is not None:
                full = logits.new_full((num_reqs, cache.shape[-1]), float("-inf"))
                logits = full.index_copy_(1, columns, logits)
            row = rows[:, k]
            live = row >= 0  # -1: a dummy run
            cache[row[live], k, : logits.shape[-1]] = logits[live].to(cache.dtype)
            row = row.clamp(min=0)
            return draw(logits, speculator.temperature[row], speculator.seeds[row], positions[:, k] - 1, k)

        return pick

    def _pick_by_vllm(self, speculator: Any, num_reqs: int) -> Pick:
        rows, positions = _slots(speculator, num_reqs)
        return lambda logits, k: speculator._sample_logits(logits, rows[:, k], positions[:, k], k)


def why_not_fused(speculator: Any, head: Markov | None, base: Tensor) -> str | None:
    """Why a step cannot be one function of ours but needs vLLM's sampler between its slots; None if it can."""
    if speculator.draft_watermarker is not None:
        return "drafts are watermarked"
    if speculator.acceptance_estimator is not None:
        return "adaptive verification without a confidence head estimates acceptance from every slot's logits"
    if speculator.draft_logits is not None and speculator.use_fp64_gumbel:
        return "noise is asked for in float64 (use_fp64_gumbel)"
    if base.is_cuda:
        from dspark_runtime.vllm import markov_triton

        return markov_triton.why_not(speculator, head, base)
    return None


def _slots(speculator: Any, num_reqs: int) -> tuple[Tensor, Tensor]:
    """(row of each draft in the speculator's per-request buffers, position that it fills), both [R, K] int64."""
    n = speculator.num_speculative_steps
    rows, positions = speculator.sample_idx_mapping, speculator.sample_pos
    return rows[: num_reqs * n].view(num_reqs, n), positions[: num_reqs * n].view(num_reqs, n)


def _temperatures(source: str, c: DrafterConfig, drafts: int) -> Tensor | None:
    """Of each draft's confidence [drafts] float32, from a local checkpoint's calibration.json; past its end the last
    one's. None without that file."""
    found = calibration.read(source) if Path(source).is_dir() else None
    if found is None:
        return None
    values, expected = found.temperatures, c.num_drafts if c.confidence != "none" else 0
    if len(values) != expected:
        raise ValueError(
            f"{source}/{calibration.FILE}: temperatures: found {len(values)}, expected {expected}"
            + (", one for each draft" if expected else ": this drafter has no confidence head")
        )
    return torch.tensor((values + values[-1:] * drafts)[:drafts], dtype=torch.float32)
