"""Generated from health.proto by `python -m shmserve.proto.compile`."""

from shmserve.proto import load

globals().update(
    load(
        "eNqtkcsOwUAUhg1RcVxzbMRKxsZq4vIIIohkmkyLpVQzUSFandH34gnF0EUTEQvL/z/5/nODaiC9kw5YFIc6xPo+"
        "jnz2tpIhZYBzIyaB9I9CXq5SaWxDSck4OfiyTbqkXxappDcCrQygovCsJC7AUtrTV2WA+mjIso3YB4g5z9Dz3jGg"
        "eAdQG2qZAlagtOJLbm94M/cUzlSsF3zWJNiACrfdbWrksQUNIybTbYoURncC1qs9CiiaEZB+nc9codP7YQeaQxeK"
        "G0/7wR8zB2RnmX+NHw10jVI="
    )
)
