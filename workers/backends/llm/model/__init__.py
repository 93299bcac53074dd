"""The decoder of a generative model in torch. Start with passes.py.

passes.py               a pass over rows, with recorded CUDA graphs
transformer.py          the decoder and its linear layers
attention.py cache.py   attention over a paged KV cache
architecture.py         the numbers of config.json
checkpoint.py           weights, tokenizer and settings of a Hugging Face folder
quantised.py            quantised weights
"""
