"""Command lines of Triton's documentation, tests and public charts, and the settings they give.

M stands for a folder that exists. A text is a part of the error; a mapping has settings by their
paths. The words "without effect" are `ServerConfig.without_effect`.
"""

import os
import re
import shlex
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from shmserve.config import command_line, server
from shmserve.errors import InvalidArgument

WITHOUT_EFFECT = "without_effect"
TIMESTAMPS = ("TIMESTAMPS",)

LINES: dict[str, str | Mapping[str, Any]] = {
    # --- repositories and models
    "--model-repo M": {"exit_on_error": True},
    "--model-repository=M --model-control-mode=POLL --log-verbose=1": {
        "model_control_mode": "poll"
    },
    "--model-repository M --repository-poll-secs 30": {"repository_poll_s": 30},
    "--model-repository=M --exit-on-error=false --strict-readiness=false": {"exit_on_error": False,
        "strict_readiness": False},
    "--model-repository=M --model-config-name=h100": {"model_config_name": "h100"},
    "--model-repository=s3://bucket/models": "aws s3 sync s3://bucket/models FOLDER",
    "--model-store=s3://minio.svc:80/bucket --exit-on-error=false": "is not a folder of this host",
    "--model-repository gs://bucket/models": "gcloud storage rsync -r gs://bucket/models FOLDER",
    "--model-repository=as://account/container/models": "azcopy sync as://account/container/models",
    "--http-address=0.0.0.0 /opt/tritonserver/bin/tritonserver --model-store=M": {
        "http.address": "0.0.0.0"
    },
    # --- listeners
    "--model-store=M --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true": {
        "http.port": 8080,
        "grpc.port": 9000,
        "http.allow": True,
    },
    "--model-repository=M --allow-grpc false --grpc-port 8788 --allow-metrics false": {"grpc": None,
        "allow_metrics": False},
    "--model-repository=M --http-restricted-api=shared-memory,model-repository:key=value": {
        "gateway.http_restricted.keys": {"shared-memory", "model-repository"}
    },
    "--model-repository=M --grpc-restricted-protocol=health:k=v --grpc-restricted-protocol "
    "inference,metadata:k=w": {"gateway.grpc_restricted.keys": {"health", "inference", "metadata"}},
    "--model-repository=M --http-header-forward-pattern .*": {
        "gateway.http_header_forward_pattern": ".*"
    },
    "--model-repository=M --grpc-infer-response-compression-level=HIGH": {
        "grpc.settings.compression_level": 9
    },
    "--model-repository=M --http-max-input-size=104857600": {"gateway.max_input_size": 104857600},
    # --- logs, metrics and traces
    "--model-repository=M --log-format=ISO8601 --log-file=/tmp/triton.log --id=rank0": {
        "log.log_format": "ISO8601",
        "gateway.id": "rank0",
    },
    "--trace-file=trace.log --trace-level=MIN --trace-rate=9 --model-repository=M": {
        "trace.trace_file": "trace.log",
        "trace.trace_level": TIMESTAMPS,
        "trace.trace_rate": 9,
    },
    "--trace-level=OFF --trace-level=max --trace-count 5 --trace-log-frequency=2 --model-store M": {
        "trace.trace_level": ("OFF",),
        "trace.trace_count": 5,
        "trace.log_frequency": 2,
    },
    "--model-repository=M --trace-config level=TIMESTAMPS --trace-config rate=1": {
        "trace.problem": "trace file name is not given (--trace-config triton,file=PATH)"
    },
    "--model-repository=M --trace-config mode=opentelemetry --trace-config=opentelemetry,resource="
        "service.name=t --trace-config opentelemetry,url=collector:4318/v1/traces --trace-config "
        "level=TIMESTAMPS": {"trace.problem": "",
        "trace.exporter": (("resource", "service.name=t"),
        ("url", "http://collector:4318/v1/traces"))},
    "--model-repository=M --trace-config=OpenTelemetry,url=localhost --trace-config mode=Triton": {
        "trace.trace_mode": "triton",
        "trace.exporter": (("url", "http://localhost"),),
    },
    # --- backends, memory and resources
    "--model-repository=M --backend-config=python,shm-default-byte-size=104857600,"
        "shm-growth-byte-size=10485760 --log-info=1": {"backend_config": (("python",
        "shm-default-byte-size", "104857600,shm-growth-byte-size=10485760"), )},
    "--model-repository=M --response-cache-byte-size 1048576": {"cache_byte_size": 1048576},
    "--model-repository=M --rate-limit=Execution_Count --rate-limit-resource=R1:10 "
    "--rate-limit-resource R2:5:0 --rate-limit-resource=R3:10:GLOBAL": {
        "rate_limit": "execution_count",
        "rate_limit_resources": (("R1", None, 10), ("R2", 0, 5), ("R3", -1, 10)),
    },
    "--model-repository=M --exit-timeout-secs=120 --model-load-thread-count=8": {
        "exit_timeout_s": 120,
        WITHOUT_EFFECT: ("model-load-thread-count",),
    },
    # --- the containers of charts and serving platforms
    "--allow-sagemaker=true --sagemaker-port 8080 --allow-grpc=false --allow-http=false "
    "--allow-metrics=false --model-control-mode=explicit --model-repository=M": {
        "grpc": None,
        "http.allow": False,
        WITHOUT_EFFECT: ("allow-sagemaker", "sagemaker-port"),
    },
    "/usr/bin/tritonserver --grpc-port=9500 --http-port=9000 --model-repository M": {
        "grpc.port": 9500
    },
    "--model-repository=M --http-address=:: --grpc-address=:: --metrics-address ::": {
        "http.address": "::"
    },
    "--model-repository M,M": ",M' is not a folder",
    "sh -c 'exec tritonserver --model-repository=M'": "unknown flag -c",  # the guide has a remedy
    # --- mistakes
    "--model-repository=M --log=1": "--log is ambiguous: --log-info, --log-warning, --log-er",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_triton_is_parsed_or_refused_by_name(line: str, tmp_path: Path) -> None:
    arguments = [re.sub(r"(^|=)M$", rf"\1{tmp_path}", word) for word in shlex.split(line)]
    expected = LINES[line]
    if isinstance(expected, str):
        with pytest.raises(InvalidArgument) as caught:
            server.from_flags(command_line.parse(arguments), os.environ)
        assert expected in caught.value.message
        return
    options = server.from_flags(command_line.parse(arguments), os.environ)
    assert set(options.model_repositories) == {tmp_path}
    for path, value in ({WITHOUT_EFFECT: ()} | dict(expected)).items():
        option_value = attrgetter(path)(options)
        assert (set(option_value()) if callable(option_value) else option_value) == value
