"""Time that passes when a test says so."""

import asyncio


class Clock:
    """The running loop's, at `now` seconds; what has a clock beside it is given `read`."""

    def __init__(self) -> None:
        self.now = 1000.0
        asyncio.get_running_loop().time = self.read  # type: ignore[method-assign]

    def read(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """So much passes at one go; then whoever has something to do has his turns."""
        self.now += seconds
        for _ in range(100):
            await asyncio.sleep(0)
