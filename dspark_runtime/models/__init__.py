"""Target models: one decoder for Llama, Qwen3 and Qwen3-MoE, one for Kimi-K3, and a scripted one for exact cases."""
