"""Generated from reflection.proto by `python -m shmserve.proto.compile`."""

from shmserve.proto import load

globals().update(
    load(
        "eNqVVNtu00AQJc1NmdzMNiQuqAjcVg0FRWAk3nhJARVUCnKqvlq2sw5GjjfsOhH5BH6Gn+MH2F1f4jiOBE+2zs7M"
        "mZlzdkGh2PWxE3okGC0oCQlCM7pwRhl49Ur7cwCDCaYrTI0UN/CPJWYhQlD5Rliolp6Uhg1D/qMLUFzPx6a9NsU3"
        "sOZYLYvzq3tGRyDj9YcYR2+gL2MdEoSWF3jBzGTruU18tRJn9MT5ZXo8kafIhqN8Hv4Z4oDx3tQqT23qp6PdWUbv"
        "k6B4AE4w2CZII9AYji3f39Q1g+XcxpSZxDXD9QKrtbjFIx6Wpt1EQV/cWx6CzqDteyw0Gd+f52Cm1uOcloAnMTq+"
        "D905ZsyaYZNGjWkuKPlm0Tl0MwPLHqLFdzawpH0GSr5t9YBHVo0u3m5U+10BdVddtiABw+gYYGX53tTMiNyQyJVQ"
        "+g4UQr2ZF1h+0rekaerPi5a/x0RGNymSzOmCKtWdYuZQbxESystHLUlfNPWLovrCVe/SlGQIvmzpsd0TROFxscIp"
        "W3X/NDnFM3SPCvyQcprQ33LEhqsmuc6LuK43Zsnw9LIeSgk+QQdTml1ZXRZ+WjiEiMyUbOMsMEagbHwZYdo19IsX"
        "jXR4kJdNvircOOVhyzjcVuGrONK+w2DPItEpdGyLYelzU74ikQFbAhU2vxEvSLHVy0VWv4XDgkWit1CPxZCNNvWT"
        "febNZBlJjnYG3XxF/ipm+pX/2gTaW8sWdyvSySHTKLRqNCRyyQF0ApEWZiyAvFh8eAl+jjD9VwmU/K1CS+jlsY+B"
        "S9D/3MmHL/4tOJplWHpZsmtS69d/AQyXKs4="
    )
)
