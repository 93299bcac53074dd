"""Long checks of text generation on real weights: `python -m tests.generation CHECK [--size N]`.

schedules     random schedules: each request's logits have the bits that they have alone
sampling      texts are distributed as those of transformers
speculation   texts for which a draft has proposed are distributed as without
schemas       structured output is valid
trained       a trained model: greedy texts, and int8's perplexity

The tests have a slice of each, `tests/unit/workers/backends/llm/test_long_checks.py`.
"""
