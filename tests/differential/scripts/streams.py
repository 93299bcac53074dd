"""Decoupled models, sequences that iterate, and warm-up."""

from tests.differential.script import Drain, Group, Known, Script, Send, recorder, tensor
from tests.differential.scripts.ensembles import COUNT, DECOUPLED

STREAM_LOOP = """
left = self.__dict__.setdefault("left", {})
key = request.correlation_id()
now = left[key] = left.get(key, int(self.input(request, "INPUT0").flat[0])) - 1
sender = request.get_response_sender()
sender.send(self.response(OUTPUT0=np.array([[now]], np.int32)))
if now > 0:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
else:
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILING_STREAM = """
sender = request.get_response_sender()
sender.send(self.response(OUTPUT0=np.array([[1]], np.int32)))
sender.send(self.failure("wrong in the middle"))
sender.send(self.response(OUTPUT0=np.array([[2]], np.int32)))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FINAL_RESPONSE = """
sender = request.get_response_sender()
sender.send(
    self.response(OUTPUT0=np.array([[1]], np.int32)),
    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
)
"""
WARMUP = """
    model_warmup [
      { name: "zeros" batch_size: 1 count: 2
        inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: [ 2 ] zero_data: true } } },
      { name: "file" batch_size: 2
        inputs { key: "INPUT0"
          value { data_type: TYPE_INT32 dims: [ 2 ] input_data_file: "data" } } }
    ]
"""
COUNTED = [Known("statistics.*", "responses are counted by their index, as later Tritons do")]


TEXT = [Known("responses.*.error.1", "the text is without file and line")]


def streaming_script(
    name: str, method_body: str, *values: int, known_differences: list[Known] | None = None
) -> Script:
    """A decoupled model receives one request at a time."""
    steps = [step for value in values for step in (_stream(name, value), Drain())]
    return Script(
        name,
        [recorder(name, DECOUPLED, method_body=method_body)],
        steps,
        known_differences or COUNTED,
    )


def _stream(name: str, value: int) -> Send:
    return Send(f"r{value}", name, value, stream=True)


def iterative(name: str, strategy: str) -> Script:
    """Requests without an id, each of which is rescheduled as often as its input sets."""
    config = f"{DECOUPLED} sequence_batching {{ iterative_sequence: true {strategy} }}"
    model = recorder(name, config, method_body=STREAM_LOOP, max_batch_size=2)
    return Script(name, [model], [_stream(name, 3), Drain(), _stream(name, 2), Drain()], COUNTED)


SCRIPTS = [
    streaming_script("counts", COUNT, 3, 1, 0),
    streaming_script("wrong_in_the_middle", FAILING_STREAM, 1),
    streaming_script("last_with_its_response", FINAL_RESPONSE, 1),
    streaming_script("raises", 'raise ValueError("early")', 1,
        known_differences=[*TEXT, *COUNTED]),
    iterative("iterative_oldest", "oldest { max_candidate_sequences: 4 }"),
    iterative("iterative_direct", "direct { }"),
    Script("warmed_up", [recorder("warmed_up", WARMUP, inputs=[tensor("INPUT0", dims=[2])],
        files={"warmup/data": bytes([7, 0, 0, 0, 9, 0, 0, 0])})],
        [Send("a", "warmed_up", 1, columns=2), Drain()],
        known_differences=[Known("statistics.*",
        "warm-up is nobody's requests, and is not counted")]),
]  # fmt: skip
GROUP = Group("streams", SCRIPTS)
