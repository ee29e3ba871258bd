"""A training of Llama 3 with 70 billion parameters, as a script: `python -m warpool predict --gpu b200 llama_70b.py`.

No card holds it. It shows what a prediction of such a model costs: docs/predict.md has the figures.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_default_dtype(torch.bfloat16)
config = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    rope_theta=500000.0,
    max_position_embeddings=8192,
    use_cache=False,
)
model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    tokens = torch.randint(128256, (1, 4096), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
