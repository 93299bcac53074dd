# The server without torch: 120 MB beside the 125 MB of the base. docker build -t shmserve .
# With ONNX files, 80 MB more: docker build -t shmserve --build-arg EXTRAS=[onnx] .
FROM python:3.12-slim-bookworm AS build
ARG EXTRAS=
COPY . /src
RUN python -m venv --without-pip /opt/shmserve && \
    pip --python /opt/shmserve/bin/python install --no-cache-dir "/src$EXTRAS"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/shmserve /opt/shmserve
RUN useradd --system shmserve
ENV PATH=/opt/shmserve/bin:$PATH
USER shmserve
EXPOSE 8000 8001 8002
ENTRYPOINT ["shmserve", "serve", "--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--metrics-address=0.0.0.0"]
