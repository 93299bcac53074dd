"""OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses and more.

POST /tokenize and /detokenize work as in vLLM.

    bodies.py               the bodies of requests, and the bodies of errors
    model_names.py          the names of models, and the model that a name stands for
    fields.py               the fields of requests: carried out, refused, or without effect
    generation.py           completions and chats, and the model's responses to a prompt
    choices.py              the choices in the responses to completions and chats
    responses_request.py    the requests of the Responses API, converted to chats
    responses.py            the responses of the Responses API, and their events
    models.py               the list of models, their embeddings, and their tokenizers

The way of a prompt to the worker. Paths are those of architecture.md. Files without a folder are in
this package, or in the folder that the same step has named before. The words in parentheses are
messages between processes:

    1. generation.py                        reads the body by bodies.py (/v1/responses: by
                                            responses_request.py)

                                            Each prompt becomes an inference request, and the other
                                            members of the body its input `sampling_parameters`.

    2. gateway/http/response_queue.py       submits the request by gateway/inference/in_flight.py
                                            (Submit), and then collects its responses

    3. scheduler/batching.py                queues the request, which hosting/host.py has received
                                            and front.py has passed on

    4. scheduler/generative/generation_dispatch.py
                                            assigns the request to a worker (Prepare)

    5. workers/backends/llm/texts.py        tokenizes the prompt by prompts.py and chat_template.py
                                            of the same folder (Prepared)

    6. scheduler/generative/engine.py       plans the steps that compute the prompt and then one
                                            token after another; the dispatcher sends them (Step)

The way of a token from the worker's step to the client:

    7. workers/backends/llm/worker_engine.py
                                            runs the step, which __init__.py of the same folder has
                                            received: model/ computes the logits, and sampler.py
                                            selects the token (Stepped, after which the scheduler
                                            plans the next step)

    8. workers/backends/llm/texts.py        converts the token to text by token_texts.py

    9. workers/batch/response_stream.py     sends the text as a response (ExecutionResponded)

    10. scheduler/instances/results.py      relays the response by scheduler/requests/responses.py
                                            (Responded)

    11. gateway/http/response_queue.py      queues the response

    12. generation.py:_Generation           decodes the response; choices.py (/v1/responses:
                                            responses.py) formats the text as an event

    13. gateway/http/messages.py            writes the event to the client's connection
"""
