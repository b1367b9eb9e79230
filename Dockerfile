# The server, as a user without privileges. On Debian or Ubuntu it is the embedded Triton with the portable engine. On
# NVIDIA's TensorRT-LLM image (BASE_IMAGE) it is that image's own Triton, Python environment and TensorRT-LLM.
ARG BASE_IMAGE=debian:bookworm-slim
# The kernels of the CPU's step are compiled here, so that the image needs no C++ compiler.
FROM ${BASE_IMAGE} AS native
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3
COPY native /opt/inflight/native
RUN python3 /opt/inflight/native/build.py

FROM ${BASE_IMAGE}

# A company's package index, wheel directory and certificate authority can take the public ones' place.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# A file in the build context, e.g. company-ca.pem.
ARG EXTRA_CA_BUNDLE
# NVIDIA's image has its packages in an environment that is first on PATH: there is no .venv, and `python3` is the image's.
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/inflight/.venv/bin:${PATH}

# Triton, the compiler of kernels, needs a C compiler on a GPU.
RUN if [ -d /opt/venv-tritonserver ]; then packages="gcc libc6-dev libpython3-dev"; else packages="make python3-venv"; fi \
 && apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 ${packages} \
 && apt-get install --yes --no-install-recommends \
    "$(python3 -c 'import sys; print("libpython%d.%d" % sys.version_info[:2])')" \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/inflight
COPY . .
COPY --from=native /opt/inflight/inflight/engine/native/libinflight_step.so inflight/engine/native/
RUN if [ -z "${PIP_INDEX_URL}" ]; then unset PIP_INDEX_URL; fi \
 && if [ -n "${EXTRA_CA_BUNDLE}" ]; then \
      cp "${EXTRA_CA_BUNDLE}" /usr/local/share/ca-certificates/extra.crt && update-ca-certificates \
      && export PIP_CERT=/etc/ssl/certs/ca-certificates.crt; \
    fi \
 && export PIP_FLAGS=--no-cache-dir \
 && if [ -d /opt/venv-tritonserver ]; then \
      /opt/venv-tritonserver/bin/python3 scripts/setup_image.py; \
    else \
      make setup EXTRAS=engine,serve; \
    fi \
 && chmod -R a+rX . \
 && useradd --uid 10001 --home-dir /var/cache/inflight inflight \
 && install --directory --mode 1777 --owner inflight /var/cache/inflight

# What is compiled at run time is kept here; all else may be read-only. Most libraries look below HOME; PyTorch would look
# in /tmp, and for the user's name in /etc/passwd, which another user than the image's does not have.
ENV HOME=/var/cache/inflight \
    USER=inflight \
    XDG_CACHE_HOME=/var/cache/inflight/.cache \
    CUDA_CACHE_PATH=/var/cache/inflight/.nv/ComputeCache \
    FLASHINFER_WORKSPACE_BASE=/var/cache/inflight \
    HF_HOME=/var/cache/inflight/.cache/huggingface \
    NUMBA_CACHE_DIR=/var/cache/inflight/.cache/numba \
    TLLM_LLMAPI_BUILD_CACHE_ROOT=/var/cache/inflight/.cache/tensorrt_llm \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/inflight/.cache/torchinductor \
    TRITON_CACHE_DIR=/var/cache/inflight/.triton/cache
VOLUME /var/cache/inflight

USER inflight
EXPOSE 8000 8001 8002 8080
# A start that loads a large model may take an hour. A server that is ready earlier is healthy within five seconds.
HEALTHCHECK --interval=5s --timeout=3s --start-period=1h --retries=3 \
    CMD ["python3", "-c", "from inflight.addresses import *; read_directly('http://127.0.0.1:8000/v2/health/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["inflight", "serve", "--host", "0.0.0.0"]
CMD ["deployments/demo"]
