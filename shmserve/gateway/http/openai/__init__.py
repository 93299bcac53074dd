"""OpenAI's interface: /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings.

A request becomes one of the model's inference requests for each of its prompts, with what it says
besides as the input `sampling_parameters`; what the model responds becomes choices.

    bodies.py       the body of a request: what it asks of which model
    answers.py      responses as choices, whole or in chunks (pure)
    generation.py   the handlers of completions and chats
    embeddings.py   the handler of embeddings
    models.py       the handlers of the models that are there
    errors.py       errors, as this interface has them
"""
