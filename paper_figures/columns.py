"""Names in the stored tables: files, columns, and which runs stand for which of the paper's systems."""

# Tables, under the results folder
BATCH_THROUGHPUT = "roofline/paper_batch_throughput.parquet"
MEMORY_WASTE = "roofline/paper_memory_waste.parquet"
THROUGHPUT = "roofline/paper_throughput.parquet"
THROUGHPUT_VARIANTS = "roofline/paper_throughput_variants.parquet"
PARALLEL_SAMPLING = "roofline/paper_parallel_sampling.parquet"
BEAM_SEARCH = "roofline/paper_beam_search.parquet"
BEAM_RECORDINGS = "roofline/paper_beam_recordings.parquet"
SHARED_PREFIX = "roofline/paper_shared_prefix.parquet"
CHAT = "roofline/paper_chat.parquet"
BLOCK_SIZE = "roofline/paper_block_size.parquet"
SWAP_VS_RECOMPUTE = "roofline/paper_swap_vs_recompute.parquet"
SWAP_MICROBENCHMARK = "roofline/paper_swap_microbenchmark.parquet"
ATTENTION_KERNEL = "cpu/attention_kernel.parquet"

# Columns of the tables of runs
ALLOCATOR = "config.allocator.name"
BATCHING = "config.scheduler.batching"
BLOCK = "config.allocator.make.block_size"
EXPERIMENT = "config.experiment"
LATENCY = "metric.normalized_latency_s"
MODEL = "config.model.name"
PREEMPTION = "config.scheduler.preemption"
PREFIX_TOKENS = "config.workload.prefix.tokens"
RATE = "config.workload.arrival.rate"
RECORDING = "config.workload.recording"
SAVING = "metric.sharing_saving_fraction"
SEED = "config.seed"
WORKLOAD = "config.workload.name"

# Panels of Figure 12 measured with other options than all else: their experiments, and how the panels are named then
VARIANTS = {"paper_throughput_mixed": ", prefill=mixed", "paper_throughput_one_by_one": ", a step for each prompt"}
DATASETS = {"sharegpt_paper": "ShareGPT", "alpaca_paper": "Alpaca"}
MODELS = {"opt_13b": "OPT-13B", "opt_66b": "OPT-66B", "opt_175b": "OPT-175B"}
# `static` stands for FasterTransformer only where whole batches were served, too (BATCHING)
SYSTEMS = {
    "static": "FasterTransformer",
    "buddy_max": "Orca (Max)",
    "buddy_pow2": "Orca (Pow2)",
    "buddy_oracle": "Orca (Oracle)",
    "paged": "vLLM",
}
ORCA_AND_PAGED = [name for name in SYSTEMS if name != "static"]
