"""Imports what exported programs need (a second, 90 MB): for a zygote whose workers load some."""

import contextlib
import importlib

# Not public, so a version of torch may lack one: then the worker imports what it needs by itself.
for _name in (
    "torch._export.serde.serialize",
    "torch.export.pt2_archive._package",
    "torch.export.passes",
    "torch._inductor.codecache",
    "torch._functorch.aot_autograd",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
