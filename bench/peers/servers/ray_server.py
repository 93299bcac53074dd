"""The Ray Serve server: one replica."""

import time

import numpy as np
from codec import MAX_BATCH_SIZE, PORT, decode, encode, load
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=64)
class Model:
    """The model named by `MODEL`, which Ray Serve calls with batches of requests."""

    def __init__(self):
        self.run = load()

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=0.0)
    async def together(self, arrays):
        return list(self.run(np.stack(arrays)))

    async def __call__(self, request: Request) -> Response:
        return Response(encode(await self.together(decode(await request.body()))))


if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Model.bind(), route_prefix="/infer")
    while True:
        time.sleep(60)
