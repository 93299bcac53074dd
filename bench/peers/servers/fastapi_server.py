"""The server of FastAPI and uvicorn, which do not batch."""

import uvicorn
from codec import PORT, decode, encode, load
from fastapi import FastAPI, Request, Response

app = FastAPI()
run = load()


@app.post("/infer")
async def infer(request: Request) -> Response:
    """Run the model on one request."""
    return Response(encode(run(decode(await request.body())[None])[0]))


uvicorn.run(app, port=PORT, log_level="warning", access_log=False)
