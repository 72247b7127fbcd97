"""Target models: one decoder for Llama, Qwen3 and Qwen3-MoE, and a scripted one for exact cases."""
