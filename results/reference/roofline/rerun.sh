#!/usr/bin/env bash
# Runs every sweep behind the tables in this folder, and collects them: about two and a half hours on one core, resumable.
#   results/reference/roofline/rerun.sh [GROUP ...]     groups: see the functions below; none: all of them
# SEEDS=0 runs the first of the three seeds alone.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-results}
HERE=results/reference/roofline

run() { "$PYTHON" -m kvbench measure.progress=false resume=true results_dir="$RESULTS" ${SEEDS:+seed=$SEEDS} "$@"; }
collect() { local table=$1; shift; "$PYTHON" -m kvbench.collect "${@/#/$RESULTS/runs/}" "$HERE/$table.parquet"; }

# The rates of max, pow2, oracle and paged, and what all four are run with.
systems() {
  local names=(buddy_max buddy_pow2 buddy_oracle paged) rates=("${@:1:4}") i
  for i in 0 1 2 3; do
    run "${@:5}" allocator="${names[i]}" workload.arrival.rate="${rates[i]}"
  done
}

# One panel of Figure 12: setup, workload, seconds, and each system's rates around its limit.
panel() {
  local common=(setup="$1" workload="$2" workload.duration_s="$3")
  run +experiment=paper_static_batching "${common[@]}" workload.arrival.rate="$4"
  systems "${@:5:4}" +experiment=paper_throughput "${common[@]}"
}

batch_throughput() { run +experiment=paper_batch_throughput; collect paper_batch_throughput paper_batch_throughput; }
memory_waste() { run +experiment=paper_memory_waste; collect paper_memory_waste paper_memory_waste; }

throughput_sharegpt() {
  panel paper_13b sharegpt_paper 3600 .05,.1,.15,.2,.3,.4 .3,.4,.5,.6,.7,.8 .5,.7,.8,.9,1.0 .8,1.0,1.1,1.2,1.4 1.4,1.7,1.9,2.1,2.3,2.5
  panel paper_66b sharegpt_paper 3600 .05,.08,.1,.15,.2 .1,.15,.2,.25,.3,.35,.4,.5 .2,.25,.3,.4,.5,.6 .3,.4,.45,.5,.6,.65,.7,.8 \
    .7,.9,1.0,1.1,1.3,1.4,1.6,1.8
  panel paper_175b sharegpt_paper 900 .05,.1,.15,.2,.3,.5,.7 .6,.8,1.0,1.2,1.5,2,2.5,3 1.0,1.2,1.4,1.6,2.0,2.5,3,3.5,4 \
    1.4,1.6,1.8,2.0,2.3,2.8,3.3,3.8,4.5 2.0,2.3,2.6,2.9,3.2,3.8,4.5,5.2,6
}

throughput_alpaca() {
  panel paper_13b alpaca_paper 300 1,2,2.5,3,4 2,3,4,5,6 12,14,16,18,20,23,26,30 18,20,22,24,27,30,33,37,42 24,28,32,36,40,46,52,60
  panel paper_66b alpaca_paper 300 .6,1,1.3,1.6,2 .8,1.1,1.4,1.7,2 5,6,7,8,9,10,11,13 8,10,11,12,14,16,18,20 15,18,20,22,25,28,32,36
  panel paper_175b alpaca_paper 300 .4,.8,1.2,1.6,2.5,3.5 4,5,6,7,8,10,12,15,18 14,17,20,23,26,32,36,40,44,50 17,20,23,26,30,36,44,55 \
    18,21,24,27,30,36,44,55
}

throughput() { collect paper_throughput paper_throughput paper_static_batching; }

# Why our rates differ from Figure 12's: with prompts beside decodes, and with each in a step of its own.
throughput_variants() {
  run +experiment=paper_throughput_mixed
  run +experiment=paper_throughput_mixed allocator=buddy_max workload.arrival.rate=6,8,10,12,15
  systems 3,4,4.5,5 14,15,16,17,18 18,20,21,22,24 22,24,25,26,28 +experiment=paper_throughput_one_by_one setup=paper_13b
  systems 1.4,1.7,1.9,2.2 8,9,10,11,12 11,12,13,14,15 13,14,15,16,18 +experiment=paper_throughput_one_by_one setup=paper_66b
  systems 8,9,10,11,12 17,18,19,20,22 18,19,20,21,22 18,19,20,21,22 +experiment=paper_throughput_one_by_one setup=paper_175b
  collect paper_throughput_variants paper_throughput_mixed paper_throughput_one_by_one
}

parallel_sampling() {
  systems .8,1.2,1.6,2,3 7,9,10,12,14,17 10,12,14,16,18,21 12,17,19,21,24,28,33 +experiment=paper_parallel_sampling workload.n=2
  systems .5,.7,1,1.5 3.5,4.5,5,6,7,8.5 5.5,7,8,9,10.5,12 7,9,10,12,14,16,19 +experiment=paper_parallel_sampling workload.n=4
  systems .5,.7,1,1.5 2,3,3.5,4,5,6 3.5,4.5,5,6,7,8.5 5,6.5,7.5,8.5,10,12,14 +experiment=paper_parallel_sampling workload.n=6
  collect paper_parallel_sampling paper_parallel_sampling
}

beam_search() {
  systems 1.2,1.6,2.2,3 8,10,13,16,20 11,14,18,22,27 10,18,23,30,37,45 +experiment=paper_beam_search workload.beam_width=2
  systems .4,.6,.9 3.5,4.5,6,7.5,9 5.5,7,9,11.5,14 6,11,14,18,21,25 +experiment=paper_beam_search workload.beam_width=4
  systems .25,.4,.6,.9 2.2,3,4,5,6.5 3.5,4.5,6,8,10 4,8,10,13,16,20 +experiment=paper_beam_search workload.beam_width=6
  collect paper_beam_search paper_beam_search
}

beam_recordings() {
  run +experiment=paper_beam_recordings workload.beam_width=2,4,6
  collect paper_beam_recordings paper_beam_recordings
}

block_size() {
  run +experiment=paper_block_size workload=sharegpt_paper workload.arrival.rate=2.1 workload.duration_s=900
  run +experiment=paper_block_size workload=alpaca_paper workload.arrival.rate=26 workload.duration_s=300
  collect paper_block_size paper_block_size
}

swap_vs_recompute() { run +experiment=paper_swap_vs_recompute workload.arrival.rate=2.1 workload.duration_s=900; collect paper_swap_vs_recompute paper_swap_vs_recompute; }

swap_microbenchmark() { run +experiment=paper_swap_microbenchmark; collect paper_swap_microbenchmark paper_swap_microbenchmark; }

shared_prefix() {
  local common=(+experiment=paper_shared_prefix workload.duration_s=200)
  run "${common[@]}" workload.prefix.tokens=80 allocator=buddy_oracle workload.arrival.rate=22,30,34,38,42
  run "${common[@]}" workload.prefix.tokens=80 allocator=paged workload.arrival.rate=46,60,70,80,90
  run "${common[@]}" workload.prefix.tokens=341 allocator=buddy_oracle workload.arrival.rate=5,8,10,12,14,18
  run "${common[@]}" workload.prefix.tokens=341 allocator=paged workload.arrival.rate=30,34,38,42,46,50
  collect paper_shared_prefix paper_shared_prefix
}

chat() {
  run +experiment=paper_chat allocator=buddy_max,buddy_pow2,buddy_oracle workload.arrival.rate=.5,.6,.65,.7,.75,.8,.9
  run +experiment=paper_chat allocator=paged workload.arrival.rate=.7,.8,.9,1.0,1.1,1.2,1.3
  collect paper_chat paper_chat
}

all=(batch_throughput memory_waste throughput_sharegpt throughput_alpaca throughput throughput_variants parallel_sampling beam_search beam_recordings
  block_size swap_vs_recompute swap_microbenchmark shared_prefix chat)
for group in "${@:-${all[@]}}"; do "$group"; done
