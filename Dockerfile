# Targets: `cpu`, the server as a user without privileges on Debian or Ubuntu, the embedded Triton with the portable
# engine; `gpu`, the same on NVIDIA's TensorRT-LLM image, with that image's own Triton, Python environment and
# TensorRT-LLM; `load`, the image `cpu` with locust. Compilers, pip and headers stay in the stage `build`.
ARG BASE_IMAGE=debian:bookworm-20261005-slim@sha256:7c7b2c966bc9ee8cedfeef67e0e279108992c77681fa595db4a9d65c06ccc587
ARG GPU_BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3@sha256:b097871d05da2e63178d1b91fd1199bc395f653ade4f05ab227c463ea7437007

# What the server needs of its distribution.
FROM ${BASE_IMAGE} AS system
# A company's certificate authority: a file in the build context, e.g. company-ca.pem.
ARG EXTRA_CA_BUNDLE
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && apt-get install --yes --no-install-recommends \
    "$(python3 -c 'import sys; print("libpython%d.%d" % sys.version_info[:2])')" \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY LICENSE ${EXTRA_CA_BUNDLE:-LICENSE} /opt/inflight/
RUN if [ -n "${EXTRA_CA_BUNDLE}" ]; then \
      mv "/opt/inflight/${EXTRA_CA_BUNDLE}" /usr/local/share/ca-certificates/extra.crt && update-ca-certificates; \
    fi \
 && useradd --uid 10001 --home-dir /var/cache/inflight inflight \
 && install --directory --mode 1777 --owner inflight /var/cache/inflight

# The kernels of the CPU's step.
FROM ${BASE_IMAGE} AS build-native
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3
COPY native /opt/build/native
RUN python3 /opt/build/native/build.py

# The packages, and the list of all that is in the image.
FROM system AS build
RUN dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' >/opt/system-packages.txt \
 && apt-get update && apt-get install --yes --no-install-recommends binutils python3-venv
WORKDIR /opt/build
# A company's package index and wheel directory can take the public ones' place.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY docker/requirements docker/requirements
COPY docker/trim.py docker/
RUN if [ -z "${PIP_INDEX_URL}" ]; then unset PIP_INDEX_URL; fi \
 && export PIP_REQUIRE_HASHES=1 PIP_NO_DEPS=1 PIP_ONLY_BINARY=:all: \
 && python3 -m venv /opt/tools \
 && /opt/tools/bin/pip install --requirement docker/requirements/tools.txt \
 && python3 -m venv --without-pip /opt/inflight/.venv \
 && /opt/tools/bin/pip --python /opt/inflight/.venv/bin/python3 install --no-compile \
    --requirement docker/requirements/server.txt \
 && python3 docker/trim.py /opt/inflight/.venv/lib/python3*/site-packages \
 && strip --strip-unneeded /opt/inflight/.venv/lib/python3*/site-packages/torch/lib/*.so \
 && /opt/inflight/.venv/bin/python3 -m compileall -q -j 0 -x py312_intrinsics /opt/inflight/.venv/lib/python3*/site-packages
COPY . .
COPY --from=build-native /opt/build/inflight/engine/native/libinflight_step.so inflight/engine/native/
RUN /opt/tools/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /opt/wheel . \
 && /opt/tools/bin/pip --python /opt/inflight/.venv/bin/python3 install --no-index --no-deps /opt/wheel/*.whl \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/python.cdx.json \
    /opt/inflight/.venv/bin/python3 \
 && python3 docker/sbom.py /opt/python.cdx.json /opt/system-packages.txt /opt/inflight/sbom.cdx.json

FROM system AS cpu
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/inflight/.venv/bin:${PATH} \
    HOME=/var/cache/inflight USER=inflight
COPY --from=build /opt/inflight /opt/inflight
WORKDIR /opt/inflight
VOLUME /var/cache/inflight
USER inflight
EXPOSE 8000 8001 8002 8080
# A start that loads a large model may take an hour. A server that is ready earlier is healthy within five seconds.
# It asks a port that is not published: those of the door may need TLS, and certificates of clients.
HEALTHCHECK --interval=5s --timeout=3s --start-period=1h --retries=3 \
    CMD ["python3", "-c", "from inflight.addresses import *; read_directly('http://127.0.0.1:8003/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["inflight", "serve", "--host", "0.0.0.0", "--door", "--status-port", "8003"]
CMD ["deployments/demo"]

# What locust needs besides, in a folder of its own: the layers of the image `cpu` are shared.
FROM build AS build-load
RUN if [ -z "${PIP_INDEX_URL}" ]; then unset PIP_INDEX_URL; fi \
 && PIP_REQUIRE_HASHES=1 PIP_NO_DEPS=1 PIP_ONLY_BINARY=:all: /opt/tools/bin/pip --python /opt/inflight/.venv/bin/python3 \
    install --target /opt/load --requirement docker/requirements/load.txt \
 && python3 docker/trim.py /opt/load

FROM cpu AS load
COPY --from=build-load /opt/load /opt/load
COPY loadtest/locustfile.py loadtest/locust_report.py /opt/load/
ENV PYTHONPATH=/opt/load
USER root
RUN install --directory --mode 1777 --owner inflight /results
VOLUME /results
USER inflight
WORKDIR /results
HEALTHCHECK NONE
ENTRYPOINT ["python3", "-m", "locust", "--locustfile", "/opt/load/locustfile.py", "--headless"]
CMD []

FROM ${GPU_BASE_IMAGE} AS gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG EXTRA_CA_BUNDLE
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Triton, the compiler of kernels, needs a C compiler on a GPU.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 gcc libc6-dev libpython3-dev \
 && apt-get install --yes --no-install-recommends \
    "$(python3 -c 'import sys; print("libpython%d.%d" % sys.version_info[:2])')" \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/inflight
COPY . .
COPY --from=build-native /opt/build/inflight/engine/native/libinflight_step.so inflight/engine/native/
RUN if [ -z "${PIP_INDEX_URL}" ]; then unset PIP_INDEX_URL; fi \
 && if [ -n "${EXTRA_CA_BUNDLE}" ]; then \
      cp "${EXTRA_CA_BUNDLE}" /usr/local/share/ca-certificates/extra.crt && update-ca-certificates \
      && export PIP_CERT=/etc/ssl/certs/ca-certificates.crt; \
    fi \
 && PIP_NO_CACHE_DIR=1 /opt/venv-tritonserver/bin/python3 scripts/setup_image.py \
 && chmod -R a+rX . \
 && useradd --uid 10001 --home-dir /var/cache/inflight inflight \
 && install --directory --mode 1777 --owner inflight /var/cache/inflight /engines

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
HEALTHCHECK --interval=5s --timeout=3s --start-period=1h --retries=3 \
    CMD ["python3", "-c", "from inflight.addresses import *; read_directly('http://127.0.0.1:8003/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["inflight", "serve", "--host", "0.0.0.0", "--door", "--status-port", "8003"]
CMD ["deployments/demo"]
