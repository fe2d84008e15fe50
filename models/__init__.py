"""Model families, one file each: ``MODELS`` maps names to configs, ``build(config)`` makes the plain torch module.

A model is stateless: ``forward(input_ids [tokens], positions [tokens]) -> logits [tokens, vocab]`` with full causal
attention. Caches, paging and batching are the compiler's business.
"""
