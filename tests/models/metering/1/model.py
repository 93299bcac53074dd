"""A model that counts, shows and observes AMOUNT in its metrics; TOTAL is its own count."""

import os
import signal

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A negative AMOUNT kills the instance; nothing is counted then."""

    def initialize(self, args):
        """Create one metric family of each kind."""
        kinds = pb_utils.MetricFamily
        self.families = [
            kinds(name=f"metering_{name}", description=f"A {name}", kind=kind)
            for name, kind in (
                ("amounts", kinds.COUNTER),
                ("level", kinds.GAUGE),
                ("running", kinds.GAUGE),
                ("sizes", kinds.HISTOGRAM),
            )
        ]
        amounts, level, running_family, sizes = self.families
        self.amounts = amounts.Metric(labels={"unit": 'a "b"\\\n', "by": args["model_name"]})
        self.level = level.Metric(labels={})
        self.running = running_family.Metric(labels={"by": args["model_name"]})
        self.sizes = sizes.Metric(labels={"by": args["model_name"]}, buckets=[0.1, 1.0, 10.0])
        self.level.set(-1)

    def execute(self, requests):
        return [self.meter(request) for request in requests]

    def meter(self, request):
        amount = float(pb_utils.get_input_tensor_by_name(request, "AMOUNT").as_numpy()[0])
        if amount < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.amounts.increment(amount)
        self.level.set(amount)
        self.running.increment(1)
        self.sizes.observe(amount)
        total = np.array([self.amounts.value()])
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
