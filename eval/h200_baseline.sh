#!/usr/bin/env bash
# The torch baseline of a decode step on a GPU: Qwen3-8B's shape with random weights, context 1024, synthetic AL 6.
# usage: eval/h200_baseline.sh FOLDER      (results as JSON in FOLDER)
set -euo pipefail  # where the copy has no git history: DSPARK_COMMIT=<commit>
out=$1
bench() { python3 -m eval.cli bench --target qwen3-8b --weights dummy --context 1024 --al 6 --tokens 96 --quiet --backend reference "${@:2}" --json "$out/$1.json"; }
bench torch_qwen3_8b_ngram -k 7 -b 1,8,32
bench torch_qwen3_8b_draft_0.6b --drafter draft:qwen3-0.6b -k 7 -b 1
bench torch_qwen3_8b_no_graph -k 7 -b 1 --no-cuda-graph
bench torch_qwen3_8b_tree32 --tree tree-32 -b 1
