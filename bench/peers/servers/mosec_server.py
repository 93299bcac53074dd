"""The mosec server: one worker."""

import numpy as np
from codec import MAX_BATCH_SIZE, decode, encode, load
from mosec import Server, Worker


class Model(Worker):
    """The model named by `MODEL`, in the methods that mosec calls."""

    def __init__(self):
        self.run = load()

    def deserialize(self, data):
        return decode(data)

    def forward(self, batch):
        return list(self.run(np.stack(batch)))

    def serialize(self, data):
        return encode(data)


if __name__ == "__main__":
    server = Server()
    # 1 ms is mosec's minimum delay.
    server.append_worker(Model, max_batch_size=MAX_BATCH_SIZE, max_wait_time=1, route="/infer")
    server.run()
