"""Plain torch: the specification of every operation. Device-generic, free of host reads, capturable in a CUDA graph."""
