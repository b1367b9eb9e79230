# The portable server: the embedded Triton and the CPU engine, as a user without privileges.
# Build arguments let a company's mirror, package index and certificate authority take the public ones' place.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX_URL
ARG EXTRA_CA_BUNDLE
ENV PYTHONUNBUFFERED=1

RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates make python3 python3-venv libpython3.11 \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/inflight
COPY . .
RUN if [ -n "${EXTRA_CA_BUNDLE}" ]; then export PIP_CERT="/opt/inflight/${EXTRA_CA_BUNDLE}"; fi \
 && make setup EXTRAS=engine PYTHON=python3.11 PIP_FLAGS="--no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}}" \
 && useradd --system --uid 10001 --home-dir /opt/inflight inflight

USER inflight
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT [".venv/bin/inflight", "serve", "--host", "0.0.0.0"]
CMD ["deployments/demo"]
