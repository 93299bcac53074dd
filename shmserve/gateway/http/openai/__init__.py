"""OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses and more.

POST /tokenize and /detokenize work as in vLLM.

Each prompt of a request becomes an inference request of the model. The other members of the body
become the input `sampling_parameters`, and the responses of the model become choices.

    bodies.py               the bodies of requests, the models they name, and the bodies of errors
    fields.py               the fields of requests: carried out, refused, or without effect
    generation.py           completions and chats
    responses_request.py    the requests of the Responses API, converted to chats
    responses.py            the responses of the Responses API, and their events
    models.py               the list of models, their embeddings, and their tokenizers
"""
