#!/usr/bin/env bash
# What this project measures on a GPU, part by part, results as JSON. Without git history there: DSPARK_COMMIT=<commit>.
#
#   eval/h200.sh build KERNELS            any machine with the compiler, once for each change of the kernels
#   eval/h200.sh run KERNELS OUT PART...  the GPU machine, in the order given; a part that fails does not stop the next
#
# Parts, with seconds: moe 70, draft 40, step 80, dense 120, fp8 60, latent 90, recurrence 90, drafter 240, kimi 150,
# vllm 400 (needs vLLM), torch 150 (the baseline without kernels), comm 400 (needs GPUS=2 to 8 of one host; 8 unless said).
set -uo pipefail
usage() { sed -n '4,8p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
export DSPARK_KERNEL_CACHE=$2 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
dspark() { "$python" -m eval.cli "$@"; }
# Qwen3-8B's shape with random weights, context 1024, AL 6: what every line of the decode step has in common.
dense() { dspark bench --target qwen3-8b --weights dummy --context 1024 --al 6 --tokens 96 --quiet "${@:2}" --json "$out/$1.json"; }

build() {
  for bench in moe latent recurrence; do "$python" -m "eval.bench_$bench" build --kernels "$1"; done
  dspark kernels build --target qwen3-8b --drafter qwen3-8b-dspark --folder "$1"
  dspark kernels build --target qwen3-8b --quantization fp8 --folder "$1"
  dspark kernels build --target smollm2-135m --drafter smollm2-135m-dspark --folder "$1"
  dspark kernels build --target kimi-k3 --rank-of 16 --parallel tp --folder "$1"
}

part() {
  case $1 in
    moe|latent|recurrence)
      "$python" -m "eval.bench_$1" run --kernels "$kernels" --json "$out/$1.json" --seconds $([ "$1" = moe ] && echo 60 || echo 80) ;;
    draft) "$python" -m eval.bench_draft --kernels "$kernels" --json "$out/draft.json" ;;
    step) "$python" -m eval.gpu_step_check --backend unmeasured --json "$out/step.json" ;;
    dense)
      dense cute_qwen3_8b_dspark --drafter qwen3-8b-dspark -k 7 -b 1,8,32 --backend unmeasured
      dense cute_qwen3_8b_dspark_tree32 --drafter qwen3-8b-dspark --tree tree-32 -b 1 --backend unmeasured ;;
    fp8) dense cute_qwen3_8b_fp8 --drafter qwen3-8b-dspark -k 7 -b 1,8 --quantization fp8 --backend unmeasured ;;
    drafter)
      dspark eval smollm2-135m-dspark --temperature 0,1 --trees chain,16,32,64 --hybrid --speed 0 --quiet --json "$out/eval_smollm2_dspark_trees.json" ;;
    kimi)
      dspark bench --target kimi-k3 --weights dummy --rank-of 16 --parallel tp --al 6 -k 7 -b 1 --backend unmeasured --quiet --json "$out/kimi_k3_rank_tp16.json" ;;
    comm) "$python" -m eval.bench_comm --gpus "${GPUS:-8}" --json "$out/comm_${GPUS:-8}.json" ;;
    vllm) dense vllm_qwen3_8b_dspark --engine vllm --drafter qwen3-8b-dspark -k 7 -b 1,8,32 ;;
    torch)
      dense torch_qwen3_8b_ngram --backend reference -k 7 -b 1,8,32
      dense torch_qwen3_8b_draft_0.6b --backend reference --drafter draft:qwen3-0.6b -k 7 -b 1
      dense torch_qwen3_8b_no_graph --backend reference -k 7 -b 1 --no-cuda-graph
      dense torch_qwen3_8b_tree32 --backend reference --tree tree-32 -b 1 ;;
    *) echo "part: found $1, allowed: see the head of $0" >&2; return 2 ;;
  esac
}

case $1 in
  build) build "$2" ;;
  run)
    [ $# -ge 4 ] || usage
    kernels=$2 out=$3 failed=()
    mkdir -p "$out"
    for name in "${@:4}"; do
      SECONDS=0
      part "$name" || failed+=("$name")
      echo "== $name: $SECONDS s"
    done
    [ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; } ;;
  *) usage ;;
esac
