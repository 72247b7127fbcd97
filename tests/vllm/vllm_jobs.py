"""Run by vLLM's own python: vllm_jobs.py JOBS OUT. Engines one after the other in this process.

JOBS is a JSON list of dictionaries: "target"; "prompts" (id lists), all at once; "tokens"; "sampling" (of
SamplingParams); "speculative" (a speculative_config, none for plain decoding); "engine" (more of LLM's arguments);
"confidence": 1 to note the confidences of a drafter's head; "ranks": 1 to note how our drawn drafts were ranked. OUT is
JSON: "jobs", for each a dictionary with

  texts     [prompt + output]
  logprobs  [[{id: log probability}]] of the outputs, if asked for
  drafts    [[request, committed tokens, chain of K, confidences, ranks]], ranks: for each slot the ids by falling logit
  counts    vLLM's own counters
  model     the drafter's class
  modules   those of this project in this process by then
  error     in place of all these: what the engine raised

and "registered", the module that vLLM has for Qwen3DSparkModel.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

gc.collect = lambda *_: 0  # takes most of an engine's start, and again at its end

newest: dict[str, tuple[list[int], list[float], list[list[int]]]] = {}
drawn: list[torch.Tensor] = []
speculators: list[DSparkSpeculator] = []
propose, load = DSparkSpeculator.propose, DSparkSpeculator.load_model


def watched(self, input_batch, *args, **kwargs):
    found = propose(self, input_batch, *args, **kwargs)
    sure = self.draft_token_confidence_probs[: len(found)].tolist() if self.use_confidence_head else [[]] * len(found)
    ranks = torch.stack(drawn, 1).argsort(-1, descending=True).tolist() if drawn else [[]] * len(found)
    drawn.clear()
    newest.update(zip(input_batch.req_ids, zip(found.tolist(), sure, ranks)))
    return found


def watch_draws() -> None:
    from dspark_runtime.vllm import model

    draw = model.draw

    def watched_draw(logits, *args):
        drawn.append(logits)
        return draw(logits, *args)

    model.draw = watched_draw


def loaded(self, *args, **kwargs):
    load(self, *args, **kwargs)
    speculators.append(self)


DSparkSpeculator.propose, DSparkSpeculator.load_model = watched, loaded


def run(job: dict) -> dict:
    prompts = job["prompts"]
    llm = LLM(
        model=job["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        max_num_seqs=max(len(prompts), 2), max_num_batched_tokens=64, enable_prefix_caching=False,
        async_scheduling=False, disable_log_stats=False, max_logprobs=-1, num_gpu_blocks_override=256,
        speculative_config=job.get("speculative"), **job.get("engine", {}),
    )  # fmt: skip
    drawn.clear()
    model = type(speculators[-1].model).__module__ if speculators else ""
    if job.get("confidence"):
        speculators[-1].use_confidence_head = True  # vLLM's switch asks for CUDA graphs
    engine = llm.llm_engine
    shared = dict(max_tokens=job["tokens"], ignore_eos=True, detokenize=False, temperature=0.0)
    sampling = shared | job.get("sampling", {})
    for i, prompt in enumerate(prompts):
        seed = dict(seed=sampling["seed"] + i) if "seed" in sampling else {}
        engine.add_request(f"{i}", dict(prompt_token_ids=prompt), SamplingParams(**sampling | seed))
    texts, drafts, logprobs = list(prompts), [], [None] * len(prompts)
    while engine.has_unfinished_requests():
        newest.clear()
        for output in engine.step():
            i = int(output.request_id)
            texts[i] = prompts[i] + list(output.outputs[0].token_ids)
            for found, name in ((output.outputs[0].logprobs, "logprobs"), (output.prompt_logprobs, "prompt_logprobs")):
                if found and name in sampling:
                    logprobs[i] = [{key: x.logprob for key, x in (line or {}).items()} for line in found]
            chain = next((v for key, v in newest.items() if key.split("-")[0] == f"{i}"), None)
            if not output.finished and chain is not None:
                drafts.append([i, len(texts[i]), *chain])
    counts = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    ours = ("dspark_runtime", "drafters", "verify_kernels")
    modules = sorted(name for name in sys.modules if name.split(".")[0] in ours)
    return dict(texts=texts, drafts=drafts, logprobs=logprobs, counts=counts, model=model, modules=modules)


def attempt(job: dict) -> dict:
    speculators.clear()
    try:
        return run(job)
    except Exception as error:
        return dict(error=str(error), kind=type(error).__name__)
    finally:
        speculators.clear()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    jobs, out = map(Path, sys.argv[1:])
    if any(job.get("ranks") for job in json.loads(jobs.read_text())):
        watch_draws()
    found = [attempt(job) for job in json.loads(jobs.read_text())]
    out.write_text(json.dumps(dict(jobs=found, registered=ModelRegistry.models["Qwen3DSparkModel"].module_name)))
