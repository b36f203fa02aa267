"""The PagedAttention paper's figures, redrawn from stored results beside the published values."""
