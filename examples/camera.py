"""Three processes share the frames of a camera: nothing is copied or sent between them.

    python examples/camera.py [--frames 300]

    camera   writes a frame into a region ──number──> inference   server.infer("edges", region)
      ^                                                   │
      └───────number of a free region───── viewer <───────┘       draws the region's outputs

Replace `picture` by the camera: `capture.read(image)` of OpenCV writes into the region, too.
"""

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import shmserve
import shmserve.client
from shmserve.client import Region
from shmserve.model import UINT8

HEIGHT, WIDTH = 480, 640
FRAME = {"image": ((1, HEIGHT, WIDTH, 3), "UINT8"), "output": ((1, HEIGHT, WIDTH), "UINT8")}


class Edges:
    """The differences between neighbouring pixels."""

    def predict(self, image: UINT8[np.ndarray, -1, -1, 3]) -> UINT8[np.ndarray, -1, -1]:
        grey = image[..., 1].astype(np.int16)
        edges = np.zeros_like(grey)
        edges[:, 1:, 1:] = abs(np.diff(grey, axis=1)[:, :, 1:]) + abs(np.diff(grey)[:, 1:])
        return np.minimum(4 * edges, 255).astype(np.uint8)


def picture(number: int, image: np.ndarray) -> None:
    """Write a frame: a disc that moves over a background."""
    image[:] = 40
    y, x = np.ogrid[:HEIGHT, :WIDTH]
    centre = WIDTH / 2 + WIDTH / 3 * np.sin(number / 15)
    image[(y - HEIGHT / 2) ** 2 + (x - centre) ** 2 < (HEIGHT / 4) ** 2] = (200, 160, 60)


def camera(
    regions: Sequence[Region], free_regions: Connection, full_regions: Connection, frames: int
) -> None:
    """Produce frames. This process has no connection to the server."""
    for number in range(frames):
        index = free_regions.recv()
        picture(number, regions[index]["image"][0])
        full_regions.send(index)
    for _ in regions:  # the viewer would end with this process, before it has drawn all frames
        free_regions.recv()


def inference(
    regions: Sequence[Region], run_dir: Path, full_regions: Connection, done_regions: Connection
) -> None:
    """Run the model on each frame, in place."""
    with shmserve.client.connect(run_dir) as server:
        while True:
            index = full_regions.recv()
            server.infer("edges", regions[index])
            done_regions.send(index)


def viewer(regions: Sequence[Region], done_regions: Connection, free_regions: Connection) -> None:
    """Draw each output in the terminal, or only the last one if there is no terminal."""
    start_s, count, drawing = time.monotonic(), 0, ""
    try:
        while True:
            index = done_regions.recv()
            blocks = regions[index]["output"].reshape(HEIGHT // 20, 20, WIDTH // 10, 10)
            small = blocks.max(axis=(1, 3)) // 52  # the brightness, 0 to 255, becomes a level
            drawing = "\n".join("".join(" .:*#"[value] for value in row) for row in small)
            count += 1
            if sys.stdout.isatty():
                print("\033[H\033[J" + drawing, flush=True)
            free_regions.send(index)
    finally:
        rate = count / (time.monotonic() - start_s)
        print(f"{drawing}\n{count} frames, {rate:.0f} per second", flush=True)


def run_until_neighbour_ends(work: Callable[..., None], *arguments: Any) -> None:
    """Run one of the three roles until Ctrl-C, or until a neighbouring process has ended."""
    ends = (EOFError, BrokenPipeError, KeyboardInterrupt, shmserve.client.Disconnected)
    with contextlib.suppress(*ends):
        work(*arguments)


def main() -> None:
    """Start the server, the memory and the three processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=300)
    frames = parser.parse_args().frames
    start = multiprocessing.get_context("spawn")
    with shmserve.serve(Edges) as server:
        regions = [server.allocate(FRAME) for _ in range(3)]
        take_free, give_free = start.Pipe(duplex=False)
        take_full, give_full = start.Pipe(duplex=False)
        take_done, give_done = start.Pipe(duplex=False)
        for index in range(len(regions)):
            give_free.send(index)
        roles: list[tuple[Any, ...]] = [
            (camera, regions, take_free, give_full, frames),
            (inference, regions, server.run_dir, take_full, give_done),
            (viewer, regions, take_done, give_free),
        ]
        processes = [start.Process(target=run_until_neighbour_ends, args=role) for role in roles]
        for process in processes:
            process.start()
        for pipe_end in (take_free, give_free, take_full, give_full, take_done, give_done):
            pipe_end.close()  # the exit of a process then ends its neighbours
        for process in processes:
            process.join()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
