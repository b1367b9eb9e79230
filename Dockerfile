# The server with the portable engine, as a user without privileges.
# On Debian or Ubuntu the embedded Triton serves; on one of NVIDIA's images (BASE_IMAGE) the Triton in it does.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}

# A company's package index, wheel directory and certificate authority can take the public ones' place.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# A file in the build context, e.g. company-ca.pem.
ARG EXTRA_CA_BUNDLE
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates make python3 python3-venv \
 && apt-get install --yes --no-install-recommends \
    "$(python3 -c 'import sys; print("libpython%d.%d" % sys.version_info[:2])')" \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/inflight
COPY . .
RUN if [ -z "${PIP_INDEX_URL}" ]; then unset PIP_INDEX_URL; fi \
 && if [ -n "${EXTRA_CA_BUNDLE}" ]; then \
      cp "${EXTRA_CA_BUNDLE}" /usr/local/share/ca-certificates/extra.crt && update-ca-certificates \
      && export PIP_CERT=/etc/ssl/certs/ca-certificates.crt; \
    fi \
 && make setup EXTRAS=engine,serve PIP_FLAGS=--no-cache-dir \
 && useradd --uid 10001 --home-dir /opt/inflight inflight

USER inflight
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
    CMD [".venv/bin/python", "-c", "from inflight.addresses import *; read_directly('http://127.0.0.1:8000/v2/health/ready')"]
STOPSIGNAL SIGTERM
ENTRYPOINT [".venv/bin/inflight", "serve", "--host", "0.0.0.0"]
CMD ["deployments/demo"]
