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
    "--model-repository=M": {"http.port": 8000, "grpc.port": 8001, "metrics_port": 8002},
    "--model-repository M --model-repository=M": {"model_control_mode": "none"},
    "--model-store=M --log-verbose 1": {"log.log_verbose_level": 1},
    "--model-repo M": {"exit_on_error": True},
    "--model-store=M --model-control-mode explicit --load-model resnet50_pytorch": {
        "load_models": ("resnet50_pytorch",)
    },
    "--model-repository=M --model-control-mode=explicit --load-model=a --load-model b": {
        "load_models": ("a", "b")
    },
    "--model-repository=M --model-control-mode=explicit --load-model=*": {"load_models": ("*",)},
    "--model-repository=M --load-model=*": "--load-model: needs --model-control-mode=explicit",
    "--model-repository=M --model-control-mode=POLL --log-verbose=1": {
        "model_control_mode": "poll"
    },
    "--model-repository M --repository-poll-secs 30": {"repository_poll_s": 30},
    "--model-store=M --model-control-mode=poll --repository-poll-secs=5": {"repository_poll_s": 5},
    "--model-repository=M --strict-model-config=False": {"auto_complete": True},
    "--model-repository=M --disable-auto-complete-config --strict-model-config=false": {
        "auto_complete": False
    },
    "--model-repository=M --exit-on-error=false --strict-readiness=false": {"exit_on_error": False,
        "strict_readiness": False},
    "--model-repository=M --model-config-name=h100": {"model_config_name": "h100"},
    "--model-repository=s3://bucket/models": "aws s3 sync s3://bucket/models FOLDER",
    "--model-store=s3://minio.svc:80/bucket --exit-on-error=false": "is not a folder of this host",
    "--model-repository gs://bucket/models": "gcloud storage rsync -r gs://bucket/models FOLDER",
    "--model-repository=as://account/container/models": "azcopy sync as://account/container/models",
    "s3://bucket/models": "--model-repository: 's3://bucket/models' is not a folder of this host",
    "--http-address=0.0.0.0 /opt/tritonserver/bin/tritonserver --model-store=M": {
        "http.address": "0.0.0.0"
    },
    # --- listeners
    "--model-store=M --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true": {
        "http.port": 8080,
        "grpc.port": 9000,
        "http.allow": True,
    },
    "--model-repository=M --http-port=10000 --grpc-port 10001 --metrics-port=10002": {
        "metrics_port": 10002
    },
    "--model-repository=M --allow-grpc false --grpc-port 8788 --allow-metrics false": {"grpc": None,
        "allow_metrics": False},
    "--model-repository=M --allow-http=true --allow-sagemaker=false --strict-readiness=false": {
        WITHOUT_EFFECT: ("allow-sagemaker",)
    },
    "--model-repository=M --allow-sagemaker=true --sagemaker-port=8080 "
    "--sagemaker-safe-port-range=8000-9000 --allow-vertex-ai=False": {
        WITHOUT_EFFECT: (
            "allow-sagemaker",
            "sagemaker-port",
            "sagemaker-safe-port-range",
            "allow-vertex-ai",
        )
    },
    "--model-repository=M --http-address 0.0.0.0 --http-thread-count=16 --reuse-http-port=1": {
        "http.address": "0.0.0.0",
        WITHOUT_EFFECT: ("http-thread-count", "reuse-http-port"),
    },
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
    "--model-repository=M --grpc-keepalive-time=10000 --grpc-keepalive-permit-without-calls=1": {
        "grpc.settings.keepalive_time_ms": 10000,
        "grpc.settings.keepalive_permit_without_calls": True,
    },
    "--model-repository=M --grpc-infer-thread-count=4 --grpc-max-response-pool-size=16 "
        "--grpc-infer-allocation-pool-size=16": {WITHOUT_EFFECT: (*("grpc-infer-thread-count",
        "grpc-max-response-pool-size"), "grpc-infer-allocation-pool-size")},
    "--model-repository=M --http-max-input-size=104857600": {"gateway.max_input_size": 104857600},
    # --- logs, metrics and traces
    "--model-repository=M --log-info=1 --log-warning=1 --log-error=1 --log-verbose=0": {
        "log.log_info": True
    },
    "--model-repository=M --log-format=ISO8601 --log-file=/tmp/triton.log --id=rank0": {
        "log.log_format": "ISO8601",
        "gateway.id": "rank0",
    },
    "--model-repository=M --metrics-config summary_latencies=true --metrics-config "
    'summary_quantiles="0.5:0.05,0.9:0.01" --metrics-interval-ms=2000.5': {
        "metrics.summary_quantiles": (0.5, 0.9),
        WITHOUT_EFFECT: ("metrics-interval-ms",),
    },
    "--model-repository=M --trace-config triton,file=/tmp/trace.json --trace-config "
    "triton,log-frequency=50 --trace-config rate=100 --trace-config level=TIMESTAMPS": {
        "trace.trace_file": "/tmp/trace.json",
        "trace.log_frequency": 50,
        "trace.trace_rate": 100,
        "trace.trace_level": TIMESTAMPS,
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
    "--model-store=M --strict-model-config=false --backend-config=tensorflow,version=2": {
        "backend_config": (("tensorflow", "version", "2"),)
    },
    "--model-repository=M --backend-config=python,shm-default-byte-size=104857600,"
        "shm-growth-byte-size=10485760 --log-info=1": {"backend_config": (("python",
        "shm-default-byte-size", "104857600,shm-growth-byte-size=10485760"), )},
    "--model-repository=M --backend-config default-max-batch-size=8 "
        "--backend-config=onnxruntime,default-max-batch-size=512": {"backend_config": (*(("",
        "default-max-batch-size", "8"), ), ("onnxruntime", "default-max-batch-size", "512"))},
    "--model-repository=M --backend-directory=/opt/tritonserver/backends --cache-directory /c "
        "--repoagent-directory=/opt/tritonserver/repoagents": {WITHOUT_EFFECT: ("backend-directory",
        "cache-directory", "repoagent-directory")},
    "--model-repository=M --cache-config=local,size=1000048576": {"cache_byte_size": 1000048576},
    "--model-repository=M --response-cache-byte-size 1048576": {"cache_byte_size": 1048576},
    "--cache-config redis,host=redis --cache-config redis,port=6379 --model-repository=M": (
        "--cache-config: there is no cache 'redis'"
    ),
    "--model-repository=M --rate-limit=Execution_Count --rate-limit-resource=R1:10 "
    "--rate-limit-resource R2:5:0 --rate-limit-resource=R3:10:GLOBAL": {
        "rate_limit": "execution_count",
        "rate_limit_resources": (("R1", None, 10), ("R2", 0, 5), ("R3", -1, 10)),
    },
    "--model-store=M --exit-on-error=true --cuda-memory-pool-byte-size 0:10000000000 "
    "--pinned-memory-pool-byte-size=268435456 --model-load-gpu-limit 0:0.8": {
        WITHOUT_EFFECT: (
            *("cuda-memory-pool-byte-size", "pinned-memory-pool-byte-size"),
            "model-load-gpu-limit",
        )
    },
    "--model-repository=M --host-policy=gpu_0,numa-node=0 --host-policy=gpu_0,cpu-cores=0-15 "
    "--enable-peer-access=false --min-supported-compute-capability=6.0": {
        WITHOUT_EFFECT: ("host-policy", "enable-peer-access", "min-supported-compute-capability")
    },
    "--model-repository=M --exit-timeout-secs=120 --model-load-thread-count=8": {
        "exit_timeout_s": 120,
        WITHOUT_EFFECT: ("model-load-thread-count",),
    },
    # --- the containers of charts and serving platforms
    "tritonserver --model-repository=M --model-control-mode=explicit --strict-model-config=false "
    "--strict-readiness=false --allow-http=true --allow-sagemaker=false": {
        "strict_readiness": False,
        WITHOUT_EFFECT: ("allow-sagemaker",),
    },
    "--allow-sagemaker=true --sagemaker-port 8080 --allow-grpc=false --allow-http=false "
    "--allow-metrics=false --model-control-mode=explicit --model-repository=M": {
        "grpc": None,
        "http.allow": False,
        WITHOUT_EFFECT: ("allow-sagemaker", "sagemaker-port"),
    },
    "--model-repository=M --allow-vertex-ai=true --vertex-ai-port=8080 "
    "--vertex-ai-default-model=m": {
        WITHOUT_EFFECT: ("allow-vertex-ai", "vertex-ai-port", "vertex-ai-default-model")
    },
    "/usr/bin/tritonserver --grpc-port=9500 --http-port=9000 --model-repository M": {
        "grpc.port": 9500
    },
    "tritonserver --model-store=M --allow-gpu-metrics=True --allow-cpu-metrics false": {
        WITHOUT_EFFECT: ("allow-gpu-metrics", "allow-cpu-metrics")
    },
    "--model-repository=M --disable-auto-complete-config --backend-config=python,"
    "shm-region-prefix-name=prefix0_ --model-load-retry-count=2": {
        "backend_config": (("python", "shm-region-prefix-name", "prefix0_"),),
        "auto_complete": False,
        WITHOUT_EFFECT: ("model-load-retry-count",),
    },
    "--model-repository=M --http-address=:: --grpc-address=:: --metrics-address ::": {
        "http.address": "::"
    },
    "--model-repository=M --allow-client-shm=true --model-namespacing=false": {
        WITHOUT_EFFECT: ("model-namespacing",)
    },
    "--model-repository=M --grpc-max-connection-age=60000 --grpc-max-connection-age-grace 1000": {
        "grpc.settings.max_connection_age_ms": 60000
    },
    "--model-repository=M --cache-config local,size=0 --exit-on-error 0": {
        "cache_byte_size": 0,
        "exit_on_error": False,
    },
    "--allow-http --allow-grpc --strict-readiness --model-repository=M": {"http.allow": True},
    "--model-repository M --rate-limit off --buffer-manager-thread-count 4": {
        "rate_limit": "off",
        WITHOUT_EFFECT: ("buffer-manager-thread-count",),
    },
    "--model-repository=M --cuda-virtual-address-size=0:34359738368 --load-model *": (
        "--load-model: needs --model-control-mode=explicit"
    ),
    "--model-repository M,M": ",M' is not a folder",
    "sh -c 'exec tritonserver --model-repository=M'": "unknown flag -c",  # the guide has a remedy
    # --- mistakes
    "--model-repository=M --log=1": "--log is ambiguous: --log-info, --log-warning, --log-er",
    "--model-repository=M --grpc_port=1": "unknown flag --grpc_port, did you mean --grpc-port?",
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
