# Images with Fornax installed from its wheel, native CPU kernels compiled:
#   docker build --target cpu  -t fornax:cpu .
#   docker build --target cuda -t fornax:cuda .    # run with --gpus all
#   docker build --target tpu  -t fornax:tpu .     # run with --privileged --net host on a TPU VM
#   docker run --rm -p 127.0.0.1:8000:8000 -v /models:/models fornax:cpu \
#     serve /models/lm --host 0.0.0.0 --api-key SECRET

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel

FROM python:${PYTHON}-slim AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends wget \
 && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /src/dist /src/constraints.txt /wheels/
RUN useradd --create-home fornax
ENV FORNAX_CACHE_DIR=/home/fornax/.cache/fornax PYTHONUNBUFFERED=1
WORKDIR /home/fornax
ENTRYPOINT ["fornax"]
CMD ["--help"]

FROM base AS cpu
RUN pip install --no-cache-dir -c /wheels/constraints.txt --find-links /wheels 'fornax-ai[serve,tune]'
ENV JAX_PLATFORMS=cpu
USER fornax

FROM base AS cuda
RUN pip install --no-cache-dir -c /wheels/constraints.txt --find-links /wheels 'fornax-ai[cluster,serve,tune,cuda]' "ray[default]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER fornax

FROM base AS tpu
RUN pip install --no-cache-dir -c /wheels/constraints.txt --find-links /wheels 'fornax-ai[cluster,serve,tune,tpu]' "ray[default]"
