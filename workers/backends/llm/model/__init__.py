"""The decoder of a generative model in torch. Start with transformer.py.

transformer.py    the decoder, its linear layers, and passes over rows, with recorded CUDA graphs
attention.py      a paged KV cache, and attention over it
architecture.py   the validated config.json, and the shapes of the weights
checkpoint.py     weights (in huge pages) and settings of a Hugging Face folder
tokenizer.py      its tokenizer
quantised.py      quantised weights
"""
