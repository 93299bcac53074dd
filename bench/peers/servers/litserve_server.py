"""The LitServe server: one worker and one process for HTTP."""

from typing import Annotated

import litserve
import numpy as np
from codec import MAX_BATCH_SIZE, PORT, decode, encode, load
from fastapi import Depends, Request, Response


async def body(request: Request) -> bytes:
    """Return the body of a request."""
    return await request.body()


class Model(litserve.LitAPI):
    """The model named by `MODEL`, in the methods that LitServe calls."""

    def setup(self, device):
        self.run = load()

    def decode_request(self, request: Annotated[bytes, Depends(body)]):
        return decode(request)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.run(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return Response(encode(output))


if __name__ == "__main__":
    api = Model(max_batch_size=MAX_BATCH_SIZE, batch_timeout=0.0, api_path="/infer")
    litserve.LitServer(api, accelerator="cpu", workers_per_device=1).run(
        port=PORT, host="127.0.0.1", generate_client_file=False, log_level="warning"
    )
