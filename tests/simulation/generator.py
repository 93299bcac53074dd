"""A simulated generative worker: token histories, and texts in a thread of their own."""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.engine_settings import ENGINE_PARAMETER, EngineSettings
from shmserve.ipc.messages import generation as g
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.schemas import byte_size_of
from tests.simulation.scheduler import SchedulerProcess
from tests.simulation.texts import STOP_TOKEN, Piece, TextRequest, request_of, texts
from tests.simulation.worker import MAX_WAIT_NS, Stream, Worker
from tests.simulation.world import US, Violation
from tests.support.generative_worker import GenerativeWorker


class Sample:
    """The text of a sample: `pieces` were sent; `open` until its end was sent."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sent_characters = 0
        self.finish_reason = ""
        self.open = True

    def add(self, tokens: list[int], reason: str) -> bool:
        """Append tokens and maybe the end reason; return whether the text has ended the sample."""
        for index, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token == STOP_TOKEN:
                self.finish_reason = "stop"
                return index < len(tokens) or not reason
        self.finish_reason = reason
        return False


class Answer(Stream):
    """A request with its samples. The samples of a beam search are known only at its end."""

    def __init__(self, work: m.Work, content: bytes, request: TextRequest) -> None:
        super().__init__(work, 0)
        self.content = content
        self.streams = request.streams
        self.samples = [Sample() for _ in range(request.samples * (request.search is None))]

    def credit(self, responses: int) -> None:
        """Return credit for responses, which may be those of the previous worker."""
        self.window.record_credit(responses)


class Generator(Worker):
    """A generative instance, which runs one step at a time, and one text job beside it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        text = self.model.config["parameters"][ENGINE_PARAMETER]["string_value"]
        self._settings = EngineSettings.read(text)
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def _attach(self, host: SchedulerProcess) -> None:
        s = self._settings
        self._jobs.clear()
        self._running = None
        self._engine = GenerativeWorker(
            s.block_size, s.kv_cache_blocks, s.swap_blocks, self.world.random.randint(0, 3)
        )
        super()._attach(host)

    def _handle(self, message: Any) -> None:
        match message:
            case g.Prepare(requests=[work], resumed=resumed_samples):
                self._open_work[work.key] = work
                self._add_job(self._prepare, work, resumed_samples)
            case g.Step():
                self._batches.append(message)
            case g.Choose():
                self._add_job(self._choose, message)
            case _:
                super()._handle(message)

    # --- steps

    def _begin(self) -> None:
        if self._running is None and self._batches:
            step = self._running = self._batches.popleft()
            min_us, max_us = self.model.compute_us
            self.world.after(self.world.between(min_us * US, max_us * US), self._finish_step, step)

    def _finish_step(self, step: g.Step) -> None:
        if not self.alive or self._running is not step or self._scheduler_link is None:
            return
        stepped = self._engine.step(step)
        known_sequences = self._engine.sequences
        if self.model.error_probability and self.world.chance(self.model.error_probability / 3):
            for row in step.rows:
                if row.sequence in known_sequences:
                    self._fail(known_sequences[row.sequence].key, "INTERNAL")
            stepped = replace(stepped, results=[], skipped=[row.sequence for row in step.rows])
        else:
            results = [
                (known_sequences[result.sequence], result)
                for result in stepped.results
                if result.sequence in known_sequences
            ]
            self._add_job(self._handle_results, results)
        self.world.after(self.world.between(US, 300 * US), self._send_step_results, step, stepped)

    def _send_step_results(self, step: g.Step, stepped: g.Stepped) -> None:
        """Send the result of a step to the scheduler. A text may have been sent before."""
        if self.alive and self._running is step:
            self._post(stepped)
            self._running = None
            self._begin()
            self._handle_inbox()

    # --- texts

    def _add_job(self, job: Callable[..., None], *arguments: Any) -> None:
        self._jobs.append((job, arguments))
        if len(self._jobs) == 1:
            self.world.after(self.world.between(US, 300 * US), self._execute_jobs)

    def _execute_jobs(self) -> None:
        if not self.alive or not self._jobs:
            return
        job, arguments = self._jobs[0]
        if self._scheduler_link is not None and self._scheduler_link.connected:
            job(*arguments)
        self._jobs.popleft()
        if self._jobs:
            self.world.after(self.world.between(US, 300 * US), self._execute_jobs)

    def _prepare(self, work: m.Work, resumed_samples: list[g.Resumed]) -> None:
        try:
            content = self._read_input(work)
        except ShmserveError as error:
            self._refuse(work, error.code)
            return
        if self.model.error_probability and self.world.chance(self.model.error_probability):
            self._refuse(work, "INTERNAL")
            return
        request, engine = request_of(content), self._engine
        answer = self._streams[work.key] = Answer(work, content, request)
        engine.prompts[work.key], engine.max_tokens_by_key[work.key] = (
            request.prompt,
            request.max_tokens,
        )
        if request.search is not None:
            engine.width[work.key] = request.search.width
        for sample in resumed_samples:
            tokens = engine.resumed_tokens[work.key, sample.sample] = array("i", sample.tokens)
            whole = texts(content)[sample.sample][0]
            if tokens[: len(whole)] != array(
                "i", whole[: None if sample.finish_reason else len(tokens)]
            ):
                raise Violation(f"{self}: {work.request_id} resumes with {sample}, not {whole}")
            answer.samples[sample.sample].add(list(tokens), sample.finish_reason)
            answer.samples[sample.sample].sent_characters = sample.sent_characters
            answer.samples[sample.sample].open = not sample.is_end_sent
        self._post(
            g.Prepared(
                work.key,
                request.prompt.tobytes(),
                request.max_tokens,
                request.samples,
                request.priority,
                request.is_whole,
                beams=[] if request.search is None else [request.search],
            )
        )
        self._send_new_tokens(work.key)

    def _refuse(self, work: m.Work, code: str) -> None:
        stream = self._streams[work.key] = Stream(work, 0)
        self._end(stream, code)

    def _fail(self, key: int, code: str) -> None:
        if key in self._streams:
            self._end(self._streams[key], code)

    def _end(self, stream: Stream, code: str) -> None:
        self._engine.prompts.pop(stream.work.key, None)
        super()._end(stream, code)

    def _handle_results(self, results: list[tuple[Any, g.RowResult]]) -> None:
        for slots, result in results:
            answer = self._streams.get(slots.key)
            if isinstance(answer, Answer) and not result.candidates:
                sample = answer.samples[slots.sample]
                if not sample.finish_reason and sample.add(result.tokens, result.finish_reason):
                    self._post(g.StopStringFound(result.sequence))
                self._send_new_tokens(slots.key)

    def _choose(self, message: g.Choose) -> None:
        answer = self._streams.get(message.key)
        if isinstance(answer, Answer):
            for best in message.hypotheses:
                sample = Sample()
                sample.tokens, sample.finish_reason = (
                    list(array("i", best.tokens)),
                    best.finish_reason,
                )
                answer.samples.append(sample)
            self._send_new_tokens(message.key)

    def _emit_soon(self, key: int) -> None:
        self._add_job(self._send_new_tokens, key)

    def _send_new_tokens(self, key: int) -> None:
        """Send the new text of a request, as far as the client's credit permits."""
        answer = self._streams.get(key)
        if not isinstance(answer, Answer):
            return
        if key in self._cancelled:
            self._end(answer, "")
            return
        samples = answer.samples
        if not answer.streams:
            if samples and all(entry.finish_reason for entry in samples):
                self._send_response(answer, samples)
            return
        for sample in samples:
            if sample.open and (
                sample.sent_characters < len(sample.tokens) or sample.finish_reason
            ):
                if not answer.window.is_open:
                    self._hold_response(answer)
                    return
                self._send_response(answer, [sample])

    def _hold_response(self, answer: Answer) -> None:
        if not answer.waits_since_ns:
            answer.waits_since_ns = self.world.now_ns
            self.world.after(MAX_WAIT_NS, self._check_overdue, answer, answer.waits_since_ns)

    def _check_overdue(self, answer: Answer, since_ns: int) -> None:
        is_current = self._streams.get(answer.work.key) is answer
        if self.alive and is_current and answer.waits_since_ns == since_ns:
            self._end(answer, "UNAVAILABLE")

    def _send_response(self, answer: Answer, samples: list[Sample]) -> None:
        """Send a response with the new text of these samples."""
        answer.waits_since_ns = 0
        pieces: list[bytes] = []
        for sample in samples:
            number = answer.samples.index(sample)
            piece = Piece(
                number,
                sample.sent_characters,
                sample.tokens[sample.sent_characters :],
                sample.finish_reason,
            )
            pieces.append(piece.packed())
            sample.sent_characters = max(sample.sent_characters, len(sample.tokens))
            sample.open = not sample.finish_reason
        final = not any(entry.open for entry in answer.samples)
        sent_news = [
            g.ResponseSent(
                answer.work.key, answer.samples.index(entry), entry.sent_characters, not entry.open
            )
            for entry in (() if final else samples)
        ]
        if final:
            self._engine.prompts.pop(answer.work.key, None)
            self._close(answer)
        body = self._compute_response(answer.work, answer.content + b"#" + b";".join(pieces), [])
        answer.window.record_sent(byte_size_of(body[1]))
        self._post_response(answer, "", body, final, *sent_news)

    def _post(self, message: Any) -> None:
        if self._scheduler_link is not None:
            self._scheduler_link.post(message)
