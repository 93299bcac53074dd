"""Zero-copy or copied inputs: what a model that writes into its inputs is given, learnt from
failures (pure).

Views are read-only, and a model that writes into its inputs fails with them, in whatever words. So
what fails with views is run once more with copies: if these cure it, the model gets copies from
then on. One that keeps failing for reasons of its own is believed for a while, after so many vain
tries, so that its failures do not cost double.
"""

from __future__ import annotations

from shmserve.workers.batch.request import Request

_TRIED_IN_A_ROW = 16
_BELIEVED = 16  # failures after each further vain try


class InputPolicy:
    """What one model has shown. `copies`: it gets copies, for good."""

    def __init__(self) -> None:
        self.copies = False
        self._vain = 0
        self._believed = 0

    def may_cure(self, request: Request) -> bool:
        """Whether a request that has failed is to be run again with copies."""
        if not any(item.shared for item in request.inputs.values()):
            return False
        if self._believed:
            self._believed -= 1
            return False
        return True

    def tried(self, cured: bool) -> None:
        """It was run again with copies."""
        if cured:
            self.copies = True
        self._vain += 1
        if self._vain >= _TRIED_IN_A_ROW:
            self._believed = _BELIEVED
