"""Trains a small network on scikit-learn's digits and writes it as a model repository."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

LARGEST_BATCH = 32
_EPOCHS = 12
_MINIBATCH = 64

_CONFIG = """\
name: "{name}"
backend: "pytorch"
{platform}default_model_filename: "{filename}"
max_batch_size: {largest}
input [ {{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 1, 8, 8 ] }} ]
output [ {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "INTRA_OP_THREAD_COUNT" value: {{ string_value: "1" }} }}
"""
_BATCHING = "dynamic_batching { max_queue_delay_microseconds: 500 }\n"


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) float32 in [0, 1] and their labels (n,) int64, split in two."""

    train_images: np.ndarray
    train_labels: np.ndarray
    held_out_images: np.ndarray
    held_out_labels: np.ndarray


class Network(nn.Module):
    """Two convolutions and a linear layer: (n, 1, 8, 8) -> (n, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.scores = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """The score of each digit for each image."""
        scores: Tensor = self.scores(torch.flatten(self.features(images), 1))
        return scores


def load() -> Digits:
    """The 1,797 images that come with scikit-learn; every third one is held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    held_out = np.arange(len(images)) % 3 == 0
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def train(digits: Digits) -> Network:
    """A network fitted to the training half; the same one each time."""
    torch.manual_seed(0)
    # So small a network gains nothing from more, and loses on a busy machine.
    torch.set_num_threads(1)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    for _ in range(_EPOCHS):
        for chosen in torch.split(torch.randperm(len(images)), _MINIBATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            torch.autograd.backward(loss)
            optimizer.step()
    return network.eval()


def write_repository(network: Network, repository: Path) -> list[str]:
    """Write four models: TorchScript and torch.export, each with and without dynamic batching.

    Returns the names of the batching ones; `NAME_unbatched` is the same model without.
    """
    example = torch.zeros(2, 1, 8, 8)
    scripted = torch.jit.trace(network, example)  # type: ignore[no-untyped-call]
    exported = torch.export.export(
        network,
        (example,),
        dynamic_shapes={"images": {0: torch.export.Dim("batch", max=LARGEST_BATCH)}},
    )
    for suffix, batching in (("", _BATCHING), ("_unbatched", "")):
        folder = _model(
            repository,
            f"digits_torchscript{suffix}",
            "model.pt",
            'platform: "pytorch_libtorch"\n',
            batching,
        )
        torch.jit.save(scripted, folder / "model.pt")
        folder = _model(repository, f"digits_export{suffix}", "model.pt2", "", batching)
        torch.export.save(exported, folder / "model.pt2")
    return ["digits_torchscript", "digits_export"]


def _model(repository: Path, name: str, filename: str, platform: str, batching: str) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    config = _CONFIG.format(name=name, filename=filename, platform=platform, largest=LARGEST_BATCH)
    (repository / name / "config.pbtxt").write_text(config + batching)
    return folder
