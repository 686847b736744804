# CPU:   docker build -t lit-dlm .
# CUDA:  docker build -t lit-dlm:cuda --build-arg DEVICE=cuda .
# Run:   docker run --rm -v "$PWD:/work" lit-dlm generate "Tom has 3 pens, finds 4. How many pens?" \
#            --config decode/threshold_09 --response_length 32        (CUDA: add --gpus all)
FROM python:3.11-slim

ARG DEVICE=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /source
# PyTorch first, in a layer of its own: PyPI's Linux wheels bring CUDA, the other index does not.
COPY constraints.txt .
RUN torch="$(grep '^torch==' constraints.txt)" \
    && if [ "$DEVICE" = cpu ]; then \
         pip install --index-url https://download.pytorch.org/whl/cpu "$torch"; \
       else \
         pip install "$torch"; \
       fi
COPY pyproject.toml README.md LICENSE cli.py ./
COPY lit_dlm lit_dlm
COPY datamodules datamodules
COPY callbacks callbacks
COPY configs configs
RUN pip install --constraint constraints.txt '.[code,log,serve]'

# Model-written code runs in a sandbox, which wants no root: `lit-dlm doctor` says which one there is.
RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["lit-dlm"]
CMD ["--help"]
