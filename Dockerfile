# wands with PyTorch for CUDA, as a user: docker build -t wands . && docker run --rm --gpus all -v "$PWD:/work" wands plan wan2.1-t2v-1.3b-lora
FROM python:3.11-slim

# DeepSpeed compiles its optimizers for offload to the host on first use.
RUN apt-get update \
    && apt-get install --no-install-recommends -y build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/wands
COPY scripts/constraints.txt scripts/
RUN pip install --no-cache-dir -c scripts/constraints.txt torch
COPY . .
RUN pip install --no-cache-dir -c scripts/constraints.txt ".[8bit,footage]" ninja

WORKDIR /work
ENTRYPOINT ["wands"]
CMD ["--help"]
