"""The decoder of a generative model in torch. Start with passes.py.

passes.py         a pass over rows, with recorded CUDA graphs
transformer.py    the decoder and its linear layers
attention.py      a paged KV cache, and attention over it
architecture.py   the numbers of config.json
checkpoint.py     weights, tokenizer and settings of a Hugging Face folder
quantised.py      quantised weights
"""
