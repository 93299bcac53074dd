"""OUTPUT0 = (INPUT0 + INPUT1) + (INPUT0 - INPUT1), by concurrent calls of another model."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model with one response per request, in order."""

    async def execute(self, requests):
        return list(await asyncio.gather(*(self.answer(request) for request in requests)))

    async def answer(self, request):
        target = pb_utils.get_input_tensor_by_name(request, "TARGET").as_numpy().flat[0].decode()
        first_input = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second_input = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        calls = [
            pb_utils.InferenceRequest(
                model_name=target,
                requested_output_names=[output],
                inputs=[
                    pb_utils.Tensor("INPUT0", first_input),
                    pb_utils.Tensor("INPUT1", second_input),
                ],
            ).async_exec()
            for output in ("OUTPUT0", "OUTPUT1")
        ]
        replies = await asyncio.gather(*calls)
        for r in replies:
            if r.has_error():
                return pb_utils.InferenceResponse(
                    [], error=pb_utils.TritonError(r.error().message())
                )
        parts = [r.output_tensors()[0].as_numpy() for r in replies]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", parts[0] + parts[1])])
