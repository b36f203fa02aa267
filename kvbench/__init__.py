"""kvbench: one decoding engine, interchangeable KV-cache allocators, measured side by side."""
