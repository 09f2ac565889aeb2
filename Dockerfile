# raylt on CPUs, or on NVIDIA GPUs with the container toolkit (docker run --gpus all).
#   docker build -t raylt .
#   docker run --rm --shm-size=4g -v "$PWD:/runs" raylt run --fleet local
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 raylt && mkdir /runs && chown raylt /runs
WORKDIR /opt/raylt
COPY pyproject.toml README.md ./
COPY raylt raylt
COPY actors actors
COPY tune tune
RUN pip install --no-cache-dir '.[timm,hf,onnx]'

USER raylt
ENV RAY_USAGE_STATS_ENABLED=0
WORKDIR /runs
ENTRYPOINT ["raylt"]
