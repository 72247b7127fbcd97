"""Run by vLLM's own python: vllm_drafts.py TARGET DRAFTER PROMPTS K TOKENS OUT.

Greedy text of every prompt (a JSON list of id lists), all requests at once, prompts in chunks, with vLLM's DSpark. OUT
is JSON: "texts" [prompt + output], "drafts" [[request, committed tokens, chain of K]], "accepted" and "steps" by vLLM's
own count.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

target, drafter, prompts, k, tokens, out = sys.argv[1:]
prompts, k, tokens = json.loads(prompts), int(k), int(tokens)
newest: dict[str, list[int]] = {}
propose = DSparkSpeculator.propose


def watched(self, input_batch, *args, **kwargs):
    found = propose(self, input_batch, *args, **kwargs)
    newest.update(zip(input_batch.req_ids, found.tolist()))
    return found


DSparkSpeculator.propose = watched
llm = LLM(
    model=target,
    skip_tokenizer_init=True,
    dtype="float32",
    enforce_eager=True,
    max_model_len=256,
    max_num_seqs=len(prompts),
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
    async_scheduling=False,
    disable_log_stats=False,
    speculative_config=dict(method="dspark", model=drafter, num_speculative_tokens=k, draft_sample_method="greedy"),
)
engine = llm.llm_engine
params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
for i, prompt in enumerate(prompts):
    engine.add_request(f"{i}", dict(prompt_token_ids=prompt), params)
texts, drafts = list(prompts), []
while engine.has_unfinished_requests():
    newest.clear()
    for output in engine.step():
        i = int(output.request_id)
        texts[i] = prompts[i] + list(output.outputs[0].token_ids)
        chain = next((v for key, v in newest.items() if key.split("-")[0] == f"{i}"), None)
        if not output.finished and chain is not None:
            drafts.append([i, len(texts[i]), chain])
counts = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")}
with open(out, "w") as file:
    accepted, steps = (counts[f"vllm:spec_decode_num_{x}"] for x in ("accepted_tokens", "drafts"))
    json.dump(dict(texts=texts, drafts=drafts, accepted=accepted, steps=steps), file)
