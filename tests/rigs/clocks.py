"""A clock whose time passes only when a test advances it."""

import asyncio


class Clock:
    """The clock of the running loop, at `now` seconds; code with another clock receives `read`."""

    def __init__(self) -> None:
        self.now = 1000.0
        asyncio.get_running_loop().time = self.read  # type: ignore[method-assign]

    def read(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """Let this time pass at once, and then run the callbacks that are due."""
        self.now += seconds
        for _ in range(100):
            await asyncio.sleep(0)
