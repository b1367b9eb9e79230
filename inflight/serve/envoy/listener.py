"""The listener: the public addresses, TLS, and HTTP as it is taken from clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.serve.envoy.filters import access_logs, early_mutations, http_filters
from inflight.serve.envoy.replies import local_replies
from inflight.serve.envoy.values import (
    CERTIFICATE,
    CLIENT_CA,
    ROUTES,
    Config,
    extension,
    from_file,
    seconds,
    socket_address,
)
from inflight.settings.door import DoorSettings

_BUFFER_BYTES = 256 << 10
_WINDOW_BYTES = 256 << 10
_CLOSE_S = 5.0
"""When a connection ends behind an answer, so long its client may take no byte of what is still on its way to it.
Envoy's own second loses the end of an answer; but a client that reads until the connection ends may wait as long."""
_IPPROTO_TCP, _TCP_USER_TIMEOUT = 6, 18
"""Linux ends a connection whose peer has taken nothing of what waits for it for so many milliseconds (tcp(7))."""


def listener(settings: DoorSettings, addresses: Sequence[str], folder: Path) -> Config:
    """Return the listener on all ``addresses``, ``host:port`` each; ``folder`` has the files that are read again."""
    # What a client speaks is known before a chain of filters is chosen: without TLS from its first bytes.
    inspector = "tls_inspector" if settings.tls.certificate else "http_inspector"
    kind = inspector.replace("_", " ").title().replace(" ", "")
    first, *others = map(socket_address, addresses)
    return {
        "name": "door",
        "address": first,
        "additional_addresses": [{"address": other} for other in others],
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "socket_options": [
            {
                "level": _IPPROTO_TCP,
                "name": _TCP_USER_TIMEOUT,
                "int_value": int(settings.client_timeout_s * 1000),
                "state": "STATE_LISTENING",
            }
        ],
        "listener_filters": [
            extension(f"envoy.filters.listener.{inspector}", f"extensions.filters.listener.{inspector}.v3.{kind}")
        ],
        "listener_filters_timeout": seconds(settings.header_timeout_s),
        "filter_chains": [
            {"filter_chain_match": {"application_protocols": ["h2", "h2c"]}, **_chain(settings, folder, http2=True)}
        ],
        "default_filter_chain": _chain(settings, folder, http2=False),
    }


def _chain(settings: DoorSettings, folder: Path, *, http2: bool) -> Config:
    manager = extension(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        **_shared(settings, folder),
        **(_http2(settings) if http2 else _http1(settings)),
    )
    chain: Config = {"name": "http2" if http2 else "http1", "filters": [manager]}
    if settings.tls.certificate is not None:
        chain["transport_socket"] = _tls(settings, folder, "h2" if http2 else "http/1.1")
    return chain


def _shared(settings: DoorSettings, folder: Path) -> Config:
    """Return how HTTP is taken, whichever version it is."""
    return {
        "rds": {"route_config_name": ROUTES, "config_source": from_file(str(folder / f"{ROUTES}.json"))},
        "http_filters": http_filters(settings, folder),
        "early_header_mutation_extensions": early_mutations(),
        "access_log": access_logs(settings),
        "local_reply_config": local_replies(settings.behind_a_door),
        "use_remote_address": True,
        "generate_request_id": False,
        "preserve_external_request_id": True,
        "server_header_transformation": "PASS_THROUGH",
        # A path counts as it was sent: one that would be another when it is read again is in no route.
        "normalize_path": False,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": settings.max_header_kib,
        "request_headers_timeout": seconds(settings.header_timeout_s),
        "stream_idle_timeout": seconds(settings.stream_idle_timeout_s),
        "stream_flush_timeout": seconds(settings.client_timeout_s),
        "delayed_close_timeout": seconds(_CLOSE_S),
        "common_http_protocol_options": {
            "idle_timeout": seconds(settings.idle_timeout_s),
            "max_headers_count": settings.max_headers,
            "headers_with_underscores_action": "DROP_HEADER",
        },
    }


def _http1(settings: DoorSettings) -> Config:
    return {
        "codec_type": "HTTP1",
        "stat_prefix": "http1",
        "request_timeout": seconds(settings.request_timeout_s),
        # Load balancers ask for the health in HTTP/1.0, some without a host.
        "http_protocol_options": {
            "allow_absolute_url": False,
            "accept_http_10": True,
            "default_host_for_http_10": "door",
        },
    }


def _http2(settings: DoorSettings) -> Config:
    """Return HTTP/2's settings. A stream of gRPC in both directions may last: its request has no time limit."""
    return {
        "codec_type": "HTTP2",
        "stat_prefix": "http2",
        "http2_protocol_options": {
            "max_concurrent_streams": settings.max_streams,
            "initial_stream_window_size": _WINDOW_BYTES,
            "initial_connection_window_size": 4 * _WINDOW_BYTES,
        },
    }


def _tls(settings: DoorSettings, folder: Path, protocol: str) -> Config:
    def secret(name: str) -> Config:
        return {"name": name, "sds_config": from_file(str(folder / f"{name}.json"))}

    common: Config = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": [protocol],
        "tls_certificate_sds_secret_configs": [secret(CERTIFICATE)],
    }
    if settings.tls.client_ca is not None:
        common["validation_context_sds_secret_config"] = secret(CLIENT_CA)
    return extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context=common,
        require_client_certificate=settings.tls.client_ca is not None,
    )
