"""The dashboard of a real server: its access control, and its display in a real browser."""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shmserve.gateway.api.figures import HISTORY_INTERVAL_S
from tests.integration.generation.conftest import EMBEDDER_CONFIG, EMBEDDER_MODEL
from tests.rigs import watched
from tests.rigs.chromium import CHROMIUM, Page, browser
from tests.rigs.watched import Feed
from tests.support import repositories
from tests.support.servers import Server, Start, running, write_tokens
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

TOKEN, INFERENCE_TOKEN = "a-token-for-metrics", "a-token-for-inference"
FLAGS = ("--exit-on-error=false", "--strict-readiness=false", "--cache-config=local,size=1048576")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server with a model of every kind, and one that does not load."""
    watched.add_models(models)
    return start(models, *FLAGS)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """Yield a browser page, and check that it has logged no error."""
    with browser(tmp_path) as opened_page:
        opened_page.size(1280, 900)
        yield opened_page


@pytest.fixture(scope="module")
def guarded_server(models: Path, start: Start) -> Server:
    repositories.add(models / "models", "identity")
    tokens = write_tokens(models / "tokens", f"{TOKEN} metrics", f"{INFERENCE_TOKEN} inference")
    return start(models / "models", f"--auth-token-file={tokens}")


def test_the_dashboard_requires_the_metrics_token(guarded_server: Server) -> None:
    with contextlib.closing(Http(guarded_server.metrics_port)) as http:
        for path in ("/", "/live", "/metrics"):
            refused = http.get(path)
            assert refused.status == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
            wrong_reply = http.get(path, {"Authorization": f"Bearer {INFERENCE_TOKEN}"})
            assert wrong_reply.status == 403
            assert wrong_reply.error == "this token has no access to the metrics API"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        reply = http.get("/", headers).ok()
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        # Without a token, the same page asks for one. It contains no data of the server.
        assert http.get("/").body == reply.body
        assert http.get("/live", {**headers, "Sec-Fetch-Site": "cross-site"}).status == 403
    with Feed(guarded_server.metrics_port, headers) as feed:
        assert feed.response.headers["Content-Type"].startswith("text/event-stream")
        assert set(feed.next()["models"]) == {"identity/1"}


def test_the_feed_has_the_figures_of_the_metrics(server: Server) -> None:
    with watched.send_under_load(server), Feed(server.metrics_port) as feed:
        first_message = feed.next()
        until(
            "all are asked", lambda: all(success_count(server, n) > 8 for n in watched.FEW_MODELS)
        )
    with Feed(server.metrics_port) as feed:
        report = feed.next()
    assert first_message["models"]["broken/1"]["state"] == "UNAVAILABLE"
    assert "there is no such weight" in first_message["models"]["broken/1"]["because"]
    for name in watched.FEW_MODELS:
        row = report["models"][f"{name}/1"]
        assert row["success"] == success_count(server, name), name
        assert row["fail"] == server.metric("nv_inference_request_failure", model=name), name
        assert row["execution_count"] == server.metric("nv_inference_exec_count", model=name)
        for reason, count in row["closed"].items():
            closed = server.metric("shmserve_batches_closed", model=name, reason=reason)
            assert closed == count, name
    assert report["models"]["pipeline/1"]["steps"] == ["half", "half"]
    cached = report["models"]["cached/1"]
    assert cached["cache_hit"] and cached["cache"]["bytes"] == server.metric("shmserve_cache_bytes")
    open_sequences = server.metric("shmserve_open_sequences", model="sums")
    assert report["models"]["sums/1"]["sequences"] == open_sequences
    resident = server.samples("shmserve_process_resident_bytes")
    assert report["server"]["processes"] == len(resident)
    # Shared pages count once (PSS), so the total is less than the sum of all resident sizes.
    used = sum(psutil.Process(process.pid).memory_full_info().pss for process in server.tree())
    assert report["server"]["pss_bytes"] == pytest.approx(used, rel=0.3)
    assert report["server"]["pss_bytes"] < 0.8 * sum(size for _, size in resident)
    assert server.metric("shmserve_model_failed", model="broken") == 1
    failed_models = server.samples("shmserve_model_failed")
    assert server.metric("shmserve_models", state="failed") == len(failed_models)
    assert server.metric("shmserve_load_failures") >= 1


def success_count(server: Server, model: str) -> float:
    return server.metric("nv_inference_request_success", model=model)


def test_the_dashboard_reports_a_dead_worker(server: Server) -> None:
    with Feed(server.metrics_port) as feed:
        feed.next()
        worker = server.find_one("worker half")
        worker.kill()
        new_events: list[dict[str, Any]] = []
        while not any(event["event"] == "ProcessEnded" for event in new_events):
            new_events += feed.next()["events"]
    (ended_event,) = [event for event in new_events if event["event"] == "ProcessEnded"]
    assert ended_event["pid"] == worker.pid and ended_event["reason"] == "signal 9"
    until("it is back", lambda: server.find("worker half"))


@needs_chromium
def test_a_browser_shows_the_figures_of_the_metrics(server: Server, page: Page) -> None:
    with watched.send_under_load(server):
        page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
        page.wait("it shows figures", "models.size >= 7 && models.get('simple/1').recent")
        page.wait("it is said what hurts", "models.get('crimes/1').because.includes('fail')")
        page.wait(
            "what does not load is first",
            "document.querySelector('#rows button').textContent === 'broken'",
        )
    page.run("show('simple/1', true)")
    expected = int(success_count(server, "simple"))
    page.wait("the last ones are counted", f"models.get('simple/1').success === {expected}")
    text = page.run("document.getElementById('bars').innerText")
    assert re.search(rf"answered\s+{expected if expected < 1e5 else ''}", text)
    assert "Why batches closed" in text or not page.run("models.get('simple/1').recent.rate")
    assert page.run("document.activeElement.id") == "detail-name"
    page.key("Escape")
    assert page.run("document.getElementById('detail').hidden")
    assert page.run("document.activeElement.textContent") == "simple"
    names = page.names()
    for wanted in (
        ("heading", "Newest events"),
        ("columnheader", "p99 ms"),
        ("rowheader", "simple"),
        ("button", "Problems first"),
    ):
        assert any(role == wanted[0] and name.startswith(wanted[1]) for role, name in names), wanted
    assert ("status", "") in names or any(role == "status" for role, _ in names)
    assert not page.console


@needs_chromium
def test_a_new_page_shows_the_history(server: Server, page: Page) -> None:
    """Charts include events of ten minutes before the page was opened."""
    with watched.send_under_load(server):
        until("all are asked", lambda: success_count(server, "simple") > 8)
        until("there is a history", lambda: has_history(server, "simple/1"), 4 * HISTORY_INTERVAL_S)
    with Feed(server.metrics_port) as feed:
        history = feed.next()["history"]
        assert "history" not in feed.next()
    assert len(history["at"]) >= 2 and history["at"] == sorted(history["at"])
    points = history["models"]["simple/1"]
    assert len(points) == len(history["at"]) and max(point[0] for point in points if point) > 0
    page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
    page.wait("it shows figures", "models.size >= 7")
    oldest_time = "past.get('simple/1').find(point => point.rate > 0).at"
    assert page.run(f"asOf - {oldest_time}") > HISTORY_INTERVAL_S - 2
    assert page.run(f"past.get('').find(point => point.rate > 0).at <= {oldest_time}")
    # The time axis ends at the server's time, and has a mark every two minutes.
    axis = "document.querySelector('#charts .axis')"
    assert page.run(f"{axis}.firstChild.textContent === clock(asOf)")
    marks = page.run(f"[...{axis}.querySelectorAll('i')].map(mark => mark.textContent)")
    assert len(marks) >= 3 and all(re.fullmatch(r"\d\d:\d[02468]", mark) for mark in marks)


def has_history(server: Server, version: str) -> bool:
    with Feed(server.metrics_port) as feed:
        history = feed.next()["history"]
    points = history["models"].get(version, [])
    return len(history["at"]) >= 2 and any(point and point[0] > 0 for point in points[:-1])


@needs_chromium
def test_the_list_of_problems_comes_first_on_a_phone(server: Server, page: Page) -> None:
    server.find_one("worker half").kill()
    until("it is back", lambda: server.find("worker half"))
    page.size(390, 844, phone=True)
    page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
    page.wait("dead workers are told", "(models.get('half/1') || {}).workers_lost > 0")
    sections = "[...document.querySelectorAll('#all > *:not([hidden])')]"
    tops = page.run(f"{sections}.map(each => [each.getBoundingClientRect().top, each.id])")
    assert min(tops)[1] == "models"
    assert page.run("$('models').getBoundingClientRect().bottom") < 844
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.size(1280, 900)
    tops = page.run(f"{sections}.map(each => [each.getBoundingClientRect().top, each.id])")
    assert min(tops)[1] != "models"


@needs_chromium
def test_the_keyboard_is_enough(server: Server, page: Page) -> None:
    page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
    page.wait("it shows figures", "models.size >= 7")
    page.key("Tab")
    assert page.run("document.activeElement.textContent") == "To the models"
    page.key("Enter")

    def press_tab_until(text: str) -> None:
        for _ in range(40):
            page.key("Tab")
            if page.run("document.activeElement.textContent") == text:
                return
        raise AssertionError(f"Tab does not reach {text}")

    press_tab_until("Model")
    page.key("Enter")
    assert page.run("document.querySelector('#rows button').textContent") == "broken"
    assert page.run("document.querySelector('th[aria-sort]').dataset.key") == "name"
    press_tab_until("pipeline")
    page.key("Enter")
    assert page.run("$('detail-name').textContent") == "pipeline, version 1"
    press_tab_until("Close")
    page.key("Enter")
    assert page.run("document.activeElement.textContent") == "pipeline"


@needs_chromium
def test_the_dashboard_fits_a_phone_and_is_readable_in_the_dark(server: Server, page: Page) -> None:
    for dark in (False, True):
        page.size(390, 844, dark=dark, phone=True)
        page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
        page.wait("it shows figures", "models.size >= 7")
        page.run("show('simple/1', true)")
        assert page.run("document.documentElement.scrollWidth") <= 390
        for part in ("#status", "dt", "td", "#rows button", "figcaption b", "li time", ".bad"):
            assert page.run(CONTRAST_SCRIPT.replace("PART", part)) >= 4.5, (part, dark)
        page.run("document.querySelector('#rows button').textContent = 'x'.repeat(255)")
        assert page.run("$('rows').parentNode.offsetWidth") < 390, "a long name is broken"
        page.run("$('detail-name').textContent = 'x'.repeat(255)")
        assert page.run("document.documentElement.scrollWidth") <= 390
    assert not page.console


# The WCAG contrast ratio of an element's text and its background.
CONTRAST_SCRIPT = """(() => {
  const lit = text => {
    const [r, g, b] = text.match(/\\d+/g).map(n => n / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const part = document.querySelector("PART");
  let behind = part;
  const back = each => getComputedStyle(each).backgroundColor;
  while (back(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const [a, b] = [getComputedStyle(part).color, back(behind)].map(lit);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""


@needs_chromium
def test_a_browser_asks_for_a_token_kept_from_urls(guarded_server: Server, page: Page) -> None:
    url = f"http://127.0.0.1:{guarded_server.metrics_port}/"
    page.navigate(url)
    page.wait("it asks", "!document.getElementById('ask').hidden")
    page.run("$('token').value = 'a-token-that-is-wrong'; $('ask').requestSubmit()")
    refused_text = "$('refused').textContent.includes('requires a known token')"
    page.wait("it says what is wrong", refused_text)
    page.run(f"$('token').value = '{TOKEN}'; $('ask').requestSubmit()")
    page.wait("it watches", "models.size === 1 && $('status').className === 'live'")
    page.navigate(f"{url}?again#token={TOKEN}")
    page.wait("it watches", "models.size === 1 && $('status').className === 'live'")
    assert TOKEN not in page.run("location.href") and TOKEN not in guarded_server.log()


@needs_chromium
def test_docs_has_a_request_to_try_for_each_model(guarded_server: Server, page: Page) -> None:
    """The page asks for a token; a token for inference suffices to list and call the models."""
    for phone in (False, True):
        page.size(390 if phone else 1280, 844, phone=phone)
        page.navigate(f"http://{guarded_server.url}/docs?{phone}")
        if not phone:
            page.wait("it asks for a token", "!$('ask').hidden")
            page.run("$('token').value = 'a\u2026token'")
            assert not page.run("$('ask').checkValidity()"), "no header can contain it"
            page.run(f"$('token').value = '{TOKEN}'; $('ask').requestSubmit()")
            page.wait("it says what is wrong", "$('refused').textContent.includes('no access to')")
            page.run(f"$('token').value = '{INFERENCE_TOKEN}'; $('ask').requestSubmit()")
        page.wait("it shows the model", "!!document.querySelector('#models details')")
        page.run("document.querySelector('#models details').open = true")
        page.run("document.querySelector('#models button').click()")
        answer = "document.querySelector('#models [role=status]').textContent"
        page.wait("the model has answered", f"{answer}.startsWith('200, ')")
        assert '"outputs":[{"name":"OUTPUT0"' in page.run(answer)
        assert page.run("document.documentElement.scrollWidth") <= (390 if phone else 1280)
    line = page.run("document.querySelector('#models pre').textContent")
    assert line.startswith(f"curl -s http://{guarded_server.url}/v2/models/identity/infer -H ")
    environment = {**os.environ, "TOKEN": INFERENCE_TOKEN}
    result = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, check=True)
    assert json.loads(result.stdout)["model_name"] == "identity"
    # The request body can be edited, and the command line contains the edited body.
    script = "(() => { const area = document.querySelector('#models textarea'); area.value = "
    page.run(script + "'{\"x\": 1}'; area.oninput(); })()")
    edited_text = page.run("document.querySelector('#models pre').textContent")
    assert edited_text.endswith("-d '{\"x\": 1}'")
    assert TOKEN not in guarded_server.log() and INFERENCE_TOKEN not in guarded_server.log()


@needs_chromium
def test_docs_has_requests_that_work_for_models_of_every_kind(tmp_path: Path, page: Page) -> None:
    """Tests each "Try" button and each command line; a model on demand shows inputs once loaded."""
    repository = tmp_path / "models"
    watched.add_models(repository, generative=True)
    repositories.add(repository, "repeat", "types", "constant")
    repositories.write(repository, "embedder", EMBEDDER_CONFIG, EMBEDDER_MODEL)
    flags = ("--model-control-mode=explicit", "--load-on-demand", "--load-model=simple")
    with running(repository, *FLAGS, *flags) as server:
        server.gate.close()  # no execution waits at the gate
        page.navigate(f"http://{server.url}/docs")
        page.wait("it shows the models", "!!document.querySelector('#models details')")
        names = page.run(
            "[...document.querySelectorAll('#models code')].map(each => each.textContent)"
        )
        assert {"broken", "embedder", "pipeline", "repeat", "simple", "sums", "tiny"} < set(names)
        for index, name in enumerate(names):
            part = f"document.querySelectorAll('#models details')[{index}]"
            answer = f"{part}.querySelector('[role=status]').textContent"
            line = f"{part}.querySelector('pre').textContent"
            body = f"!!{part}.querySelector('pre + textarea, pre + pre + button')"
            if name != "simple":
                assert not page.run(body)
                run = subprocess.run(
                    ["bash", "-c", page.run(line)], capture_output=True, check=True
                )
                assert json.loads(run.stdout).get("name") == (None if name == "broken" else name)
                page.run(f"{part}.querySelector('button').click()")
            if name == "broken":
                page.wait("it has not loaded", f"{answer}.includes('no such weight')")
                continue
            page.wait(f"{name} has a body", body)
            page.run(f"{part}.querySelector('button').click()")
            page.wait(f"{name} has answered", f"/^[0-9]+,/.test({answer})")
            assert page.run(answer).startswith("200, "), page.run(answer)
            run = subprocess.run(["bash", "-c", page.run(line)], capture_output=True, check=True)
            assert b'"error"' not in run.stdout and name.encode() in run.stdout, run.stdout
        with server.http() as http:
            example_requests = http.get("/docs/models").ok().json()
        paths: dict[str, list[str]] = {name: [] for name in names}
        for example in example_requests:
            paths[example["model"]].append(example["path"])
        assert paths["tiny"] == ["/v1/completions", "/v1/chat/completions"]
        assert paths["embedder"] == ["/v2/models/embedder/infer", "/v1/embeddings"]
        script = "[...document.querySelectorAll('#models pre:first-child')].map(e => e.textContent)"
        (line,) = [text for text in page.run(script) if "/v1/embeddings" in text]
        run = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
        assert json.loads(run.stdout)["object"] == "list"


@needs_chromium
def test_a_hidden_page_sends_no_requests(server: Server, page: Page) -> None:
    gateway = server.find_one("gateway")
    until("nobody watches", lambda: gateway.num_threads() == 1)
    page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
    page.wait("it watches", "$('status').className === 'live'")
    assert gateway.num_threads() > 1, "of the library that events come by"
    page.hide(hidden=True)
    until("it has hung up", lambda: gateway.num_threads() == 1)
    page.hide(hidden=False)
    page.wait("it watches", "$('status').className === 'live'")
    until("it is back", lambda: gateway.num_threads() > 1)


@needs_chromium
def test_the_dashboard_reconnects_after_a_restart(tmp_path: Path, page: Page) -> None:
    repositories.add(tmp_path / "models", "identity")
    first_server = Server([tmp_path / "models"]).wait_ready()
    first_server.wait_named()
    ports = first_server.http_port, first_server.metrics_port
    page.navigate(f"http://127.0.0.1:{first_server.metrics_port}/")
    page.wait("it watches", "$('status').className === 'live'")
    first_server.process.terminate()
    page.wait("it says so", "$('status').className === 'lost'")
    page.wait("it is grey", "getComputedStyle($('all')).filter === 'grayscale(1)'")
    assert re.fullmatch(r"shmserve as of \d\d:\d\d:\d\d", page.run("document.title"))
    assert re.match(r"as of \d\d:\d\d:\d\d: the server does", page.run("$('status').textContent"))
    assert first_server.wait_exit(20) == 0
    second_server = Server([tmp_path / "models"], ports=ports)
    try:
        second_server.wait_ready()
        second_server.wait_named()
        page.wait("it watches again", "$('status').className === 'live' && models.size === 1")
        assert page.run("document.title") == "shmserve"
        assert page.run("getComputedStyle($('all')).filter") == "none"
    finally:
        first_server.discard()
        second_server.stop()


@needs_chromium
def test_200_models(server: Server, page: Page) -> None:
    """Measures the browser's work for one event."""
    page.navigate(f"http://127.0.0.1:{server.metrics_port}/")
    page.wait("it watches", "$('status').className === 'live'")
    page.run("abort.abort(); watch = () => {}; connect = () => new Promise(() => {})")
    figures_code = """(() => {
      const row = models.get("simple/1");
      const news = {whole: true, models: {}, server: {cpu: 0}, events: []};
      for (let n = 0; n < 200; n++) news.models[`model_${n}/1`] = {...row, hurts: n};
      take(news);
      const began = performance.now();
      for (const key in news.models) {
        news.models[key] = {...row, pending: 7, hurts: 200 * Math.random()};
      }
      take({...news, whole: false});
      return performance.now() - began;
    })()"""
    took_ms = page.run(figures_code)
    assert page.run("document.querySelectorAll('#rows tr').length") == 200
    assert took_ms < 1000, "a look takes longer than the time until the next"
    page.run("$('filter').value = 'MODEL_19'; $('filter').oninput()")
    assert page.run("document.querySelectorAll('#rows tr').length") == 11
    assert page.run("$('models-name').textContent") == "Models (11 of 200)"
